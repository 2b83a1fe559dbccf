"""Save and load the state of a run: weights, their running average, the optimizer's state and the progress."""

import shutil
from dataclasses import replace

from timm.utils import distribute_bn
from torch import nn

from revzoo.errors import CheckpointError
from revzoo.training.divergence import check_weights
from revzoo.training.processes import call_on_main
from revzoo.training.run import Run
from revzoo.training.state_files import StateWriter, list_contents, read_state_tensors


def save_state(run: Run) -> None:
    """Save everything needed to resume from here; until that is complete, the previous state stays the newest.

    It may be complete only later, when `run.upload` says so.

    Raises:
        DivergedError: there are infinities or NaN in the weights; nothing is saved.
        RevzooError: this state, or the one before it, could not be written.
    """
    run.upload.wait()
    share_statistics(run)  # a state has room for one process's
    check_weights(run)
    writing, scaler = run.folder.states / "writing", run.accelerator.scaler
    settings = {"scaler": None if scaler is None else scaler.state_dict()}
    run.progress.processes = run.accelerator.num_processes
    progress = replace(run.progress)  # as it is now, whatever training does meanwhile

    def publish() -> None:
        run.origin.save(writing)
        run.folder.publish_state(writing, progress, run.recipe.train.keep_states)

    def prepare() -> None:
        run.folder.require_held()
        shutil.rmtree(writing, ignore_errors=True)

    call_on_main(run.accelerator, prepare)
    run.upload.start(list_contents(_list_modules(run), run.optimizer.optimizer, settings), StateWriter(writing, publish))


def load_state(run: Run) -> None:
    """Load weights, their running average and the optimizer's state from the newest state of the run's folder.

    However many processes have saved it, each takes what it needs.

    Raises:
        CheckpointError: a file is missing, damaged, or of another model.
    """
    state = run.folder.find_state()
    try:
        settings = read_state_tensors(state, _list_modules(run), run.optimizer.optimizer)
    except CheckpointError as error:
        raise run.folder.explain_damage(state, error) from error
    except Exception as error:  # damaged files make the readers raise all kinds of exceptions
        raise run.folder.explain_damage(state, f"{type(error).__name__}: {error}") from error
    if run.accelerator.scaler is not None and settings["scaler"] is not None:
        run.accelerator.scaler.load_state_dict(settings["scaler"])


def _list_modules(run: Run) -> dict[str, nn.Module]:
    return {"model": run.model} if run.ema is None else {"model": run.model, "ema": run.ema.module}


def share_statistics(run: Run) -> None:
    """Give all processes the same statistics; all processes call this together, before they evaluate or save.

    With DistributedDataParallel they are the first one's, which the next forward takes anyway. Processes that divide a network
    take the mean of theirs. Statistics are linear in those of the batches, so that the mean does not depend, but for rounding,
    on how often it is taken.
    """
    processes, is_divided = run.accelerator.num_processes, run.mesh is not None
    if processes > 1:
        for model in dict.fromkeys([run.model, run.evaluated]) if is_divided else [run.evaluated]:
            distribute_bn(model, processes, reduce=is_divided)
