"""What a run was started with: recipe, model, classes and examples. A resumed run must have the same, or say what changed.

A state holds it as origin.json. Without the comparison a renamed class folder would shift the labels, another number of files
would show some examples twice, and another optimizer would meet the state of the first.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast

from accelerate.utils import broadcast_object_list, gather_object

from revzoo.bounds import PositiveInt
from revzoo.data.base import Data
from revzoo.errors import InputError, join_names
from revzoo.spec import Spec
from revzoo.spec.parsing import parse_json_as, to_plain
from revzoo.spec.tree import find_differences
from revzoo.training.options import Recipe
from revzoo.training.run_folder import Progress, RunFolder

ORIGIN = "origin.json"
T = TypeVar("T")


@dataclass(frozen=True)
class Origin:
    """What a run was started with.

    Args:
        recipe: the recipe as plain dicts.
        spec: the model's spec as plain dicts.
        classes: names of the classes in the order of their labels; None where the data do not name them.
        examples: for each split, the number of examples and the digest of what they are.
        batch_size: examples of a batch, which the processes share: data.batch_size times as many as there were at the start.
    """

    recipe: Any
    spec: Any
    classes: tuple[str, ...] | None
    examples: Any
    batch_size: PositiveInt

    @classmethod
    def of(cls, recipe: Recipe, spec: Spec, data: Data, batch_size: int) -> "Origin":
        """Return what a run with this recipe, model, data and batch is started with."""
        classes = None if data.class_names is None else tuple(data.class_names)
        return cls(to_plain(recipe), to_plain(spec), classes, data.describe_examples(), batch_size)

    def save(self, state: Path) -> None:
        """Write origin.json into the folder of a state."""
        (state / ORIGIN).write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def load(cls, state: Path) -> "Origin":
        """Read origin.json of a state.

        Raises:
            OSError: it is missing.
            ValueError, TypeError: it is damaged.
        """
        return cast(Origin, parse_json_as(cls, (state / ORIGIN).read_bytes()))

    def list_changes(self, now: "Origin") -> dict[str, str]:
        """Return what is different now, and in words what it was and is.

        The keys are paths in the recipe, "spec." with a path in the spec, "classes", and "training examples" and the like.
        """
        changes = find_differences(self.recipe, now.recipe)
        changes |= {f"spec.{path}": words for path, words in find_differences(self.spec, now.spec).items()}
        if self.classes != now.classes:
            changes["classes"] = _compare_names(self.classes or (), now.classes or ())
        return changes | compare_examples(self.examples, now.examples)


def compare_examples(before: Any, now: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Return in words how the examples of each split differ; the keys are "training examples" and "test examples"."""
    changes = find_differences(before, now)
    changed = [split for split in now if any(path.startswith(split) for path in changes)]
    return {f"{split} examples": changes.get(f"{split}.count", "others than then") for split in changed}


def read_origin(folder: RunFolder) -> Origin:
    """Return what the newest state of a folder says the run was started with.

    Raises:
        CheckpointError: it does not say it.
    """
    state = folder.find_state()
    try:
        return Origin.load(state)
    except (OSError, ValueError, TypeError) as error:
        raise folder.explain_damage(state / ORIGIN, error) from error


def require_same(own: T, compare: Callable[[T, T], Iterable[str]]) -> None:
    """Check that all processes have the same thing, such as the recipe, which says what groups they form.

    Args:
        own: what this process has.
        compare: names what is different in two of them.

    Raises:
        InputError: they have not; raised in every process, with the same message.
    """
    [first] = broadcast_object_list([own])
    lines = [
        f"process {number} has other {join_names(names, most=6)}"
        for number, names in enumerate(gather_object([list(compare(first, own))]))
        if names
    ]
    if lines:
        raise InputError(
            f"All processes have to train the same model on the same data, and {join_names(lines, most=4)} than process 0. "
            "Give all of them the same files."
        )


def _compare_names(before: Sequence[str], now: Sequence[str]) -> str:
    """Return in words how two lists of names differ: the names that only one of them has."""
    old, present = set(before), set(now)
    gone, new = [name for name in before if name not in present], [name for name in now if name not in old]
    sides = [f"{join_names(names)} only {when}" for names, when in ((gone, "at the start"), (new, "now")) if names]
    return ", ".join(sides) or "the same names, in another order"


# What can change between two updates and then does what it says. Everything else has no effect in a resumed run, as the weights
# to start from, or contradicts what was done before, as another optimizer or batch size.
_CHANGEABLE = (
    *("data.augment", "data.num_workers", "data.root", "data.shift", "data.text.tokenizer", "data.unreadable"),
    *("memory", "mixup", "model.exact", "model.schedule", "model.tiles", "train"),
)
_FIXED = ("train.accumulate", "train.freeze", "train.seed")
# Of what can change, what a plan depends on.
_PLANNED = ("memory", "mixup", "model.exact", "model.tiles", "train.mixed_precision", "train.optimizer_in_backward")
_WITHOUT_END = ("constant", "step", "multistep")  # schedules that do not depend on where a run ends


def check_changes(
    folder: RunFolder, now: Origin, recipe: Recipe, progress: Progress, typed: Iterable[str], accept: bool
) -> dict[str, str]:
    """Return what has changed since a run was started, if it can go on like this: by path, in words.

    Args:
        folder: of the run; its newest state says what it was started with.
        now: what it is made of now.
        recipe: the recipe now.
        progress: what is done.
        typed: paths of the recipe that the user has just set, which accepts their changes.
        accept: accept every change that makes sense.

    Raises:
        InputError: something has changed that cannot, or that nobody has accepted. All changes are listed.
        CheckpointError: the newest state does not say what the run was started with.
    """
    changes = read_origin(folder).list_changes(now)
    lines = [f"{path}: {words}" for path, words in changes.items()]
    impossible = [path for path in changes if _is_within(path, _FIXED) or not _is_within(path, _CHANGEABLE)]
    if impossible:
        _refuse(
            folder, lines, f"A resumed run cannot change {join_names(impossible, most=6)}. Put that back, or start a new run."
        )
    for name, done in (("epochs", progress.epoch), ("max_updates", progress.updates)):
        if (getattr(recipe.train, name) or done) < done:
            _refuse(folder, lines, f"{done} {name.removeprefix('max_')} are done. Use train.{name}={done} or more.")
    if {"train.epochs", "train.max_updates"} & changes.keys() and (reason := _find_end(recipe)) and not accept:
        remedy = f"Accept the jump with --accept-changes, or start a new run{folder.say_from_weights()}."
        _refuse(folder, lines, f"{reason} reaches its end with the run, so it would jump. {remedy}")
    if not accept and any(not _is_within(path, typed) for path in changes):
        _refuse(folder, lines, "Put it back, or accept it with --accept-changes.")
    return changes


def needs_new_plan(changed: Iterable[str]) -> bool:
    """Return whether a plan made before these paths of the recipe were changed holds no more."""
    return any(_is_within(path, _PLANNED) for path in changed)


def _refuse(folder: RunFolder, lines: list[str], remedy: str) -> NoReturn:
    raise InputError("\n  ".join([f"{folder.path} was started with something else:", *lines]) + f"\n{remedy}")


def _find_end(recipe: Recipe) -> str:
    """Return in words which schedule depends on where the run ends, or an empty string."""
    if recipe.coupling is not None:
        return "The schedule of the coupling"
    return "" if recipe.schedule.sched in _WITHOUT_END else f"schedule.sched={recipe.schedule.sched}"


def _is_within(path: str, sections: Iterable[str]) -> bool:
    return any(path == section or path.startswith(f"{section}.") for section in sections)
