"""The memory of a run's training step: counted before the first one, which is refused where it takes more than there is."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from traceback import clear_frames

from revzoo.analysis.dry_run import memory_errors
from revzoo.analysis.step_memory import AS_IT_IS
from revzoo.device import forget_peak
from revzoo.errors import BudgetError, InputError
from revzoo.format import format_bytes
from revzoo.planning.budget import parse_budget
from revzoo.planning.fit import explain_shortage, require_fit
from revzoo.runtime.mode import MODES, Mode
from revzoo.training.planned_step import PlannedStep
from revzoo.training.run import Run
from revzoo.training.run_plan import count_sharing


def describe_memory(run: Run) -> str:
    """Return a line on what a step of the whole network takes.

    Raises:
        BudgetError: it takes more than is free; the error says what fits.
        MissingValueError: the network asks for values, so it cannot be counted.
    """
    step = PlannedStep(run)
    reports, _ = step.measure_modes((AS_IT_IS, Mode.STORE))
    peak = reports[AS_IT_IS].peak_bytes
    require_fit(
        partial(count_step, run),
        run.batch_size,
        run.accelerator.device,
        _name_batch(run),
        taken=peak,
        present_bytes=step.present_bytes,
        sharing=count_sharing(run),
        multiple=find_multiple(run),
        others=partial(_suggest_budget, run),
    )
    stored = reports.get(Mode.STORE, reports[AS_IT_IS]).peak_bytes
    saved = f" ({format_bytes(stored)} with everything stored: {1 - peak / stored:.0%} less)" if peak < stored else ""
    return f"Memory: a step takes {format_bytes(peak)}{saved}."


@contextmanager
def explain_lack_of_memory(run: Run) -> Iterator[None]:
    """Raise BudgetError, which says what would fit, where a step of the whole network finds too little memory."""
    try:
        with memory_errors():
            yield
    except MemoryError as error:
        if run.mesh is not None:
            raise
        for each in filter(None, (error, error.__cause__)):
            clear_frames(each.__traceback__)  # which hold what the step has allocated
        forget_peak(run.accelerator.device)
        try:
            message = _explain(run, str(error).partition(". ")[0])
        except InputError:  # it cannot be counted
            raise error from None
        raise BudgetError(message) from error


def _explain(run: Run, received: str) -> str:
    device, size = run.accelerator.device, run.batch_size
    taken = count_step(run, size)
    limit = parse_budget("auto", device, PlannedStep(run).present_bytes, sharing=count_sharing(run))
    limit = min(limit, taken * 9 // 10)
    words, others = f"memory ran out ({received})", _suggest_budget(run, limit)
    return explain_shortage(partial(count_step, run), size, _name_batch(run), limit, words, others, taken, find_multiple(run))


def _name_batch(run: Run) -> str:
    """Return what to type before the examples of a batch, which a run that has begun keeps."""
    return "a new run with data.batch_size=" if run.folder.list_states() else "data.batch_size="


def find_multiple(run: Run) -> int:
    """Return of what the size of a batch is a multiple."""
    return 2 if run.recipe.mixup else 1  # which takes pairs


def count_step(run: Run, size: int) -> int:
    """Return the bytes of a step with the run's schedule and another batch size."""
    return PlannedStep(run, size).measure_modes((AS_IT_IS,))[0][AS_IT_IS].peak_bytes


def _suggest_budget(run: Run, limit: int) -> list[str]:
    """Return the setting that lets the planner decide, where some uniform schedule is within the limit: then one is a plan."""
    recipe = run.recipe
    if recipe.memory.budget is not None or recipe.coupling is not None:
        return []
    peaks = [report.peak_bytes for report in PlannedStep(run).measure_modes(MODES)[0].values()]
    return ["memory.budget=auto"] if len(peaks) > 1 and min(peaks) <= limit else []
