"""Save and load the state of a run: weights, their running average, the optimizer's state and the progress."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from accelerate.utils import gather_object
from safetensors import SafetensorError
from torch import nn

from revzoo.errors import CheckpointError, RevzooError
from revzoo.training.divergence import check_weights
from revzoo.training.main_process import call_on_all, call_on_main
from revzoo.training.seal import hash_file
from revzoo.training.setup import Run
from revzoo.training.state_tensors import METADATA, list_own_files, read_tensors, write_tensors
from revzoo.training.statistics import share_statistics
from revzoo.training.terminal import has_lost_others


def save_state(run: Run) -> None:
    """Save everything needed to resume from here; until that is complete, the previous state stays the newest.

    Raises:
        DivergedError: there are infinities or NaN in the weights; nothing is saved.
        RevzooError: it could not be written.
    """
    share_statistics(run)  # a state has room for one process's
    check_weights(run)
    writing, scaler = run.folder.states / "writing", run.accelerator.scaler
    settings = {"scaler": None if scaler is None else scaler.state_dict()}
    call_on_main(run.accelerator, lambda: shutil.rmtree(writing, ignore_errors=True))
    with saving(run):
        write_tensors(writing, _list_modules(run), run.optimizer.optimizer, settings)
    own = call_on_all(run.accelerator, lambda: {path.name: hash_file(path) for path in list_own_files(writing)})
    checksums = {name: checksum for each in gather_object([own]) for name, checksum in each.items()}
    run.progress.processes = run.accelerator.num_processes

    def publish() -> None:
        with saving(run):
            run.origin.save(writing)
            run.folder.publish_state(writing, run.progress, run.recipe.train.keep_states, checksums)

    call_on_main(run.accelerator, publish)


def load_state(run: Run) -> None:
    """Load weights, their running average and the optimizer's state from the newest state of the run's folder.

    However many processes have saved it, each takes what it needs.

    Raises:
        CheckpointError: a file is missing, damaged, or of another model.
    """
    state = run.folder.find_state()
    try:
        settings = read_tensors(state, _list_modules(run), run.optimizer.optimizer)
    except CheckpointError as error:
        raise run.folder.explain_damage(state, error) from error
    except Exception as error:  # damaged files make the readers raise all kinds of exceptions
        raise run.folder.explain_damage(state / METADATA, f"{type(error).__name__}: {error}") from error
    if run.accelerator.scaler is not None and settings["scaler"] is not None:
        run.accelerator.scaler.load_state_dict(settings["scaler"])


def _list_modules(run: Run) -> dict[str, nn.Module]:
    return {"model": run.model} if run.ema is None else {"model": run.model, "ema": run.ema.module}


@contextmanager
def saving(run: Run) -> Iterator[None]:
    """Explain an error that ends the writing of a file inside the block, and make room by removing a half-written state.

    Raises:
        RevzooError: what was written could not be.
    """
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:  # a full disk raises any of these
        if has_lost_others(error):
            raise
        shutil.rmtree(run.folder.states / "writing", ignore_errors=True)
        raise RevzooError(
            f"Nothing more can be saved in {run.folder.path} ({error}). Is the disk full? What was saved before is complete: "
            f"make room and resume with revzoo train --resume {run.folder.path}"
        ) from error
