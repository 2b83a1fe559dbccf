"""Save and load the state of a run: weights, their running average, the optimizer's state and the progress."""

import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError

from revzoo.checkpoint import files
from revzoo.errors import CheckpointError, RevzooError
from revzoo.training.divergence import check_weights
from revzoo.training.main_process import call_on_all, call_on_main
from revzoo.training.setup import Run


def save_state(run: Run) -> None:
    """Save everything needed to resume from here; until that is complete, the previous state stays the newest.

    Raises:
        DivergedError: there are infinities or NaN in the weights; nothing is saved.
        RevzooError: it could not be written.
    """
    check_weights(run)
    writing = run.folder.states / "writing"
    call_on_main(run.accelerator, lambda: shutil.rmtree(writing, ignore_errors=True))
    run.progress.loss_sums = gather_losses(run)
    call_on_all(run.accelerator, lambda: _write_shared(run, writing))
    call_on_main(run.accelerator, lambda: _publish(run, writing))


def _write_shared(run: Run, writing: Path) -> None:
    """Write what every process has its part in."""
    if run.mesh is not None:
        return
    with saving(run), _quiet_about_tied_tensors():
        run.accelerator.save_state(str(writing))


def _publish(run: Run, writing: Path) -> None:
    """Write the rest and make it the newest state."""
    with saving(run):
        if run.ema is not None and run.mesh is None:
            files.save_weights(run.ema.module, writing / "ema.safetensors")
        writing.mkdir(parents=True, exist_ok=True)
        run.origin.save(writing)
        run.folder.publish_state(writing, run.progress, run.recipe.train.keep_states)


def load_state(run: Run) -> None:
    """Load weights, their running average and the optimizer's state from the newest state of the run's folder.

    Raises:
        CheckpointError: a file is missing, damaged, or of another model.
    """
    state = run.folder.find_state()
    try:
        # Accelerate loads the weights once more; this reports what is wrong with the file.
        files.load_weights(run.model, state / "model.safetensors")
        if run.ema is not None:
            files.load_weights(run.ema.module, state / "ema.safetensors")
    except CheckpointError as error:
        raise run.folder.explain_damage(state, error) from error
    try:
        run.accelerator.load_state(str(state))
    except Exception as error:  # damaged files make the reader raise all kinds of exceptions
        raise run.folder.explain_damage(state / "optimizer.bin", f"{type(error).__name__}: {error}") from error


@contextmanager
def saving(run: Run) -> Iterator[None]:
    """Explain an error that ends the writing of a file inside the block, and make room by removing a half-written state.

    Raises:
        RevzooError: what was written could not be.
    """
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:  # a full disk raises any of these
        shutil.rmtree(run.folder.states / "writing", ignore_errors=True)
        raise RevzooError(
            f"Nothing more can be saved in {run.folder.path} ({error}). Is the disk full? What was saved before is complete: "
            f"make room and resume with revzoo train --resume {run.folder.path}"
        ) from error


@contextmanager
def _quiet_about_tied_tensors() -> Iterator[None]:
    """Silence Accelerate's warning about a tied embedding, which it rightly saves only once."""
    logger = logging.getLogger("accelerate.utils.other")
    logger.addFilter(_is_not_about_tied_tensors)
    try:
        yield
    finally:
        logger.removeFilter(_is_not_about_tied_tensors)


def _is_not_about_tied_tensors(record: logging.LogRecord) -> bool:
    return "Removed shared tensor" not in record.getMessage()


def gather_losses(run: Run) -> list[float]:
    """Return the sum of the current epoch's training losses of every process."""
    own = torch.tensor([run.progress.loss_sums[run.accelerator.process_index]], device=run.accelerator.device)
    losses: list[float] = run.accelerator.gather(own).tolist()
    return losses
