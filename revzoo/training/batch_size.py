"""The batch size that `data.batch_size=auto` stands for, chosen before a run is built with it.

For that, a run is built whose batch is one example: the step of any other number can then be counted, planned and timed. The
learning rate is not changed: how it should follow the batch depends on the optimizer, and is the user's to decide.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from accelerate import Accelerator

from revzoo.data.options import read_batch_range
from revzoo.errors import BudgetError, InputError
from revzoo.format import format_bytes
from revzoo.planning.budget import parse_budget
from revzoo.planning.fit import explain_shortage, find_largest
from revzoo.runtime.mode import MODES
from revzoo.spec.tree import OVERRIDE
from revzoo.training.memory import count_step, find_multiple
from revzoo.training.options import Recipe
from revzoo.training.planned_step import PlannedStep
from revzoo.training.recipe import load_recipe
from revzoo.training.run import Run
from revzoo.training.setup import build_run

_LEAST_UPDATES = 10  # in an epoch: with fewer, few epochs would be hardly any training, whatever fits


def settle_batch_size(
    recipe: Recipe, accelerator: Accelerator, report: Callable[[str], object] = lambda what: None
) -> tuple[Recipe, list[str]]:
    """Return the recipe with a number for `data.batch_size`, and notes on how it was chosen.

    Args:
        recipe: the recipe.
        accelerator: Accelerate's object for it.
        report: is told how far it is.

    Raises:
        SpecError: several processes, or a step that cannot be counted.
        BudgetError: not even the smallest batch fits.
    """
    asked = recipe.data.batch_size
    if isinstance(asked, int):
        return recipe, []
    if accelerator.num_processes > 1:
        raise recipe.error("data.batch_size", repr(asked), "a number, with several processes")
    with TemporaryDirectory() as folder:
        first = replace(recipe, data=replace(recipe.data, batch_size=2 if recipe.mixup else 1))
        run = build_run(first, Path(folder), accelerator, resumed=False)
    size, reason = _choose(run, *(read_batch_range(asked) or (1, None)), report)
    accelerator.free_memory()  # it keeps what it has prepared
    note = f"data.batch_size={asked}: {size}, {reason}. optimizer.lr={recipe.optimizer.lr:g} stays"
    written = load_recipe(recipe.file, complete=False).data.batch_size
    if isinstance(written, int) and recipe.places.get("optimizer.lr") != OVERRIDE:
        note += f", which the recipe has for data.batch_size={written}"
    return replace(recipe, data=replace(recipe.data, batch_size=size)), [note]


def _choose(run: Run, low: int, high: int | None, report: Callable[[str], object]) -> tuple[int, str]:
    """Return the number of examples, and why it is this number."""
    recipe, pairs, step = run.recipe, find_multiple(run), PlannedStep(run)
    most = min(high or run.data.num_train // (_LEAST_UPDATES * recipe.train.accumulate), run.data.num_train) // pairs
    least, most = -(-low // pairs), max(most, 1)
    budget = recipe.memory.budget
    limit = parse_budget("auto" if budget is None else budget, run.accelerator.device, step.present_bytes)
    count = partial(count_step, run) if budget is None else partial(_count_least, run)
    try:
        largest = find_largest(lambda number: count(number * pairs), most, limit)
    except InputError as error:
        raise recipe.error("data.batch_size", repr(recipe.data.batch_size), f"a number: {error}") from error
    if largest < least:
        words, smallest = f"{format_bytes(limit)} may be taken", least * pairs
        raise BudgetError(explain_shortage(count, smallest, "data.batch_size=", limit, words, (), count(smallest), pairs))
    if budget is not None:
        return _find_fastest(run, least, largest, limit, report)
    if largest < most:
        return largest * pairs, f"the largest whose step fits the {format_bytes(limit)} that may be taken"
    return largest * pairs, "the most that was asked for" if high else f"the largest with {_LEAST_UPDATES} updates in an epoch"


def _count_least(run: Run, size: int) -> int:
    """Return the bytes of a step in the mode that takes least."""
    return min(report.peak_bytes for report in PlannedStep(run, size).measure_modes(MODES)[0].values())


def _find_fastest(run: Run, least: int, most: int, limit: int, report: Callable[[str], object]) -> tuple[int, str]:
    """Return the number of examples that trains most of them a second within the limit, and its speed in words."""
    from revzoo.planning.batch import find_fastest, search_sizes

    pairs = find_multiple(run)

    def look_at(number: int) -> tuple[float, int]:
        report(f"looking for the fastest batch size: {number * pairs}")
        step = PlannedStep(run, number * pairs)
        return step.measure_seconds(step.plan(limit)), number

    measured = search_sizes(look_at, least, most)
    size = (best := find_fastest(measured)) * pairs
    speed = f"{size / measured[best][0]:.3g} {run.data.example_noun} a second"
    return size, f"the fastest of {least * pairs} to {max(measured) * pairs} within {format_bytes(limit)} ({speed})"
