"""What a plan is compared with: the two uniform schedules, and the fastest schedules of other budgets."""

import statistics
from collections.abc import Sequence
from typing import TypedDict

from torch import nn

from revzoo.planning.plan import Plan
from revzoo.planning.profiling.hooks import list_units
from revzoo.planning.profiling.inversion_limit import place_anchors
from revzoo.planning.profiling.profile import Profile
from revzoo.planning.solvers.schedule_totals import cost, peak
from revzoo.planning.solvers.timeline import minimize_peak, solve_timeline
from revzoo.runtime.mode import Mode

_BUDGETS = 24  # enough for a smooth curve


class SchedulePoint(TypedDict):
    """The memory and work of one schedule.

    Args:
        peak_bytes: peak of all memory together.
        seconds: of one forward and backward; None where nothing was run.
        extra_flops: of one forward and backward, beyond those of storing everything.
    """

    peak_bytes: int
    seconds: float | None
    extra_flops: int


def evaluate_schedule(profile: Profile, modes: Sequence[str]) -> SchedulePoint:
    """Return the memory and work of a schedule of the profiled model."""
    return {
        "peak_bytes": peak(profile.problem, modes),
        "seconds": profile.predict_seconds(modes),
        "extra_flops": cost(profile.memory, modes),
    }


def summarize_plan(plan: Plan) -> SchedulePoint:
    """Return the memory and work that a plan names."""
    return {"peak_bytes": plan.peak_bytes, "seconds": plan.seconds, "extra_flops": plan.extra_flops}


def evaluate_uniform_schedules(model: nn.Module, profile: Profile) -> dict[str, SchedulePoint]:
    """Return the points of "all stored" and of "all inverted", the latter in runs as long as is safe, if any are."""
    entries, limit = list_units(model), profile.memory.max_invert_run
    points = {"all stored": evaluate_schedule(profile, profile.memory.all_stored)}
    if any(entry.can_invert for entry in entries) and limit != 0:
        points["all inverted"] = evaluate_schedule(profile, place_anchors(entries, limit))
    return points


def evaluate_budgets(profile: Profile, count: int = _BUDGETS) -> list[SchedulePoint]:
    """Return the points of the fastest schedules for a range of budgets, each schedule once.

    Args:
        profile: of the model.
        count: number of budgets, evenly spaced from the smallest possible peak to that of storing everything; at least 2.
    """
    problem = profile.problem
    smallest, modes = minimize_peak(problem)
    stored = peak(problem, problem.all_stored)
    budgets = (smallest + (stored - smallest) * i // (count - 1) for i in range(1, count))
    schedules = [modes, *(solve_timeline(problem, budget) for budget in budgets)]
    points = {tuple(modes): evaluate_schedule(profile, modes) for modes in schedules if modes is not None}
    return list(points.values())


def inversion_ratio(profile: Profile) -> float | None:
    """Return the extra time of inverting a step over the time of its forward, as a median; None where nothing was timed.

    Source: "An Efficient Training Framework for Reversible Neural Architectures" (Jiang et al. 2020) assumes 1.
    """
    if profile.timing is None:
        return None
    times = zip(profile.timing.extra, profile.timing.forward_seconds, strict=True)
    ratios = [extra[Mode.INVERT] / 1e9 / forward for extra, forward in times if Mode.INVERT in extra and forward]
    return statistics.median(ratios) if ratios else None
