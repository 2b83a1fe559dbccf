"""Changes between the start of a run and its resumption: which make sense, and which are refused."""

from collections.abc import Iterable
from pathlib import Path
from typing import NoReturn

from revzoo.errors import InputError, join_names
from revzoo.training.options import Recipe
from revzoo.training.origin import read_origin
from revzoo.training.setup import Run

# What can change between two updates and then does what it says. Everything else has no effect in a resumed run, as the weights
# to start from, or contradicts what was done before, as another optimizer or batch size.
_CHANGEABLE = (
    "data.augment",
    "data.num_workers",
    "data.root",
    "data.shift",
    "data.text.tokenizer",
    "memory",
    "mixup",
    "model.exact",
    "model.schedule",
    "train.class_weights",
    "train.clip_grad",
    "train.compile",
    "train.cuda_graph",
    "train.epochs",
    "train.keep_states",
    "train.label_smoothing",
    "train.mixed_precision",
    "train.offload",
    "train.optimizer_in_backward",
    "train.patience",
    "train.save_every",
    "train.shard",
    "train.timeout_seconds",
    "train.track",
)
_PLANNED = (
    "memory",
    "mixup",
    "model.exact",
    "train.mixed_precision",
    "train.offload",
    "train.optimizer_in_backward",
    "train.shard",
)  # of these, what a plan depends on
_WITHOUT_END = ("constant", "step", "multistep")  # schedules that do not depend on the number of epochs


def check_changes(run: Run, typed: Iterable[str], accept: bool) -> dict[str, str]:
    """Return what has changed since a run was started, if it can go on like this: by path, in words.

    Args:
        run: the run; its newest state says what it was started with.
        typed: paths of the recipe that the user has just set, which accepts their changes.
        accept: accept every change that makes sense.

    Raises:
        InputError: something has changed that cannot, or that nobody has accepted. All changes are listed.
        CheckpointError: the newest state does not say what the run was started with.
    """
    changes = read_origin(run.folder).list_changes(run.origin)
    lines = [f"{path}: {words}" for path, words in changes.items()]
    folder, done = run.folder.path, run.progress.epoch
    impossible = [path for path in changes if not _is_within(path, _CHANGEABLE)]
    if impossible:
        _refuse(
            folder, lines, f"A resumed run cannot change {join_names(impossible, most=6)}. Put that back, or start a new run."
        )
    if run.recipe.train.epochs < done:
        _refuse(folder, lines, f"{done} epochs are done. Use train.epochs={done} or more.")
    if "train.epochs" in changes and (reason := _find_end(run.recipe)) and not accept:
        remedy = f"Accept the jump with --accept-changes, or start a new run{run.folder.say_from_weights()}."
        _refuse(folder, lines, f"{reason} reaches its end in the last epoch, so it would jump. {remedy}")
    if not accept and any(not _is_within(path, typed) for path in changes):
        _refuse(folder, lines, "Put it back, or accept it with --accept-changes.")
    return changes


def needs_new_plan(changed: Iterable[str]) -> bool:
    """Return whether a plan made before these paths of the recipe were changed holds no more."""
    return any(_is_within(path, _PLANNED) for path in changed)


def _refuse(folder: Path, lines: list[str], remedy: str) -> NoReturn:
    raise InputError("\n  ".join([f"{folder} was started with something else:", *lines]) + f"\n{remedy}")


def _find_end(recipe: Recipe) -> str:
    """Return in words which schedule depends on the number of epochs, or an empty string."""
    if recipe.coupling is not None:
        return "The schedule of the coupling"
    return "" if recipe.schedule.sched in _WITHOUT_END else f"schedule.sched={recipe.schedule.sched}"


def _is_within(path: str, sections: Iterable[str]) -> bool:
    return any(path == section or path.startswith(f"{section}.") for section in sections)
