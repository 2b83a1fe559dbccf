"""The batch size that trains most samples a second within a budget: a larger batch against a faster schedule.

Every size that is looked at is planned, and the planned training step is run. The search begins with both ends and the middle
of the range and then halves the distance to the best size so far. It finds the best size of all if the speed first rises with
the size and then falls. That is so where a training step takes a constant time and an equal time for each sample: larger
batches share the constant part until what they keep no longer fits, and then recovery adds work.

Source: problem 8 of "An Efficient Training Framework for Reversible Neural Architectures" (Jiang et al. 2020).
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

import torch

from revzoo.analysis.dry_run import LossFunction, memory_errors
from revzoo.errors import BudgetError, InputError
from revzoo.format import format_seconds
from revzoo.model.model import Model
from revzoo.planning.budget import count_model_bytes, parse_budget
from revzoo.planning.comparison import evaluate_uniform_schedules
from revzoo.planning.plan import Plan
from revzoo.planning.planner import profile_and_plan
from revzoo.planning.profiling.timing import measure_step_seconds
from revzoo.planning.solvers import Solver
from revzoo.runtime.lookahead import LookaheadOption

T = TypeVar("T")
_PARTS = 32  # of the range: sizes that are nearer to each other are not told apart


@dataclass(frozen=True)
class BatchRow:
    """The time and memory of one batch size.

    Args:
        batch: the size.
        planned: seconds of a training step with the plan, measured by running it.
        stored: predicted seconds with everything stored; None where that does not fit the budget, or was not timed.
        inverted: the same with every step inverted.
        peak_bytes: of the plan.
        schedule: of the plan.
    """

    batch: int
    planned: float
    stored: float | None
    inverted: float | None
    peak_bytes: int
    schedule: tuple[str, ...]


@dataclass(frozen=True)
class BatchPlan:
    """The best batch size and its plan, and the other sizes that were looked at.

    Args:
        batch: the best size.
        plan: for this size.
        seconds: of a training step with the plan, measured by running it.
        rows: every size that was planned and fits the budget, rising.
    """

    batch: int
    plan: Plan
    seconds: float
    rows: tuple[BatchRow, ...]

    @property
    def samples_per_second(self) -> float:
        """The measured speed of forward and backward at the best size."""
        return self.batch / self.seconds

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain data."""
        return {**asdict(self), "samples_per_second": self.samples_per_second}

    def __str__(self) -> str:
        return (
            f"{self.plan}\nbatch {self.batch} of {self.rows[0].batch} to {self.rows[-1].batch} is best: "
            f"{self.samples_per_second:.4g} samples a second ({format_seconds(self.seconds)} a training step, measured)"
        )


def find_best_batch(
    model: Model,
    budget: str | int,
    low: int,
    high: int,
    *,
    solver: Solver = "timeline",
    optimizer: torch.optim.Optimizer | None = None,
    loss: LossFunction | None = None,
    lookahead: LookaheadOption = 0,
) -> BatchPlan:
    """Return the batch size from `low` to `high` with most samples per second within the budget, with its plan.

    Args:
        model: a `revzoo.Model`, which makes its own batches.
        budget: limit for the peak of all memory together, as for `revzoo.solve`.
        low: the smallest size, at least 1.
        high: the largest size, at least `low`.
        solver, optimizer, loss, lookahead: as for `revzoo.plan`.
    Raises:
        InputError: not 1 <= low <= high, or a model without values, which cannot be timed.
        BudgetError: not even the smallest batch fits the budget, or it cannot be run on the device.
        RecoveryError: a step does not return the same output when it runs again.
    Cost: about a dozen plans, at most.
    """
    if not isinstance(model, Model):
        raise InputError(
            f"Batches are made with model.example_input. Received: {type(model).__name__}. Use revzoo.plan for each size."
        )
    if not (type(low) is type(high) is int and 1 <= low <= high):
        raise InputError(f"Batch sizes go from a number >= 1 to one that is no smaller. Received: {low} to {high}.")
    if any(p.is_meta for p in model.parameters()):
        raise InputError(
            "The best batch depends on measured seconds. Received: a model on the meta device. Make it on a real one."
        )
    limit = parse_budget(budget, next(model.parameters()).device, count_model_bytes(model))

    def look_at(size: int) -> tuple[float, tuple[BatchRow, Plan]]:
        with memory_errors():
            batch = model.example_input(size)
            profile, plan = profile_and_plan(
                model, batch, limit, solver=solver, optimizer=optimizer, loss=loss, lookahead=lookahead
            )
            seconds, spread = measure_step_seconds(model, batch, plan.schedule, loss, plan.lookahead)
        points = evaluate_uniform_schedules(model, profile)
        stored, inverted = (
            points[name]["seconds"] if name in points and points[name]["peak_bytes"] <= limit else None
            for name in ("all stored", "all inverted")
        )
        if list(plan.schedule) == profile.memory.all_stored:  # such a plan is made without timing anything
            stored, plan = seconds, replace(plan, seconds=seconds, spread=spread)
        return seconds, (BatchRow(size, seconds, stored, inverted, plan.peak_bytes, plan.schedule), plan)

    measured = search_sizes(look_at, low, high)
    best = find_fastest(measured)
    seconds, (_, plan) = measured[best]
    return BatchPlan(best, plan, seconds, tuple(measured[size][1][0] for size in sorted(measured)))


def search_sizes(look_at: Callable[[int], tuple[float, T]], low: int, high: int) -> dict[int, tuple[float, T]]:
    """Look for the batch size from `low` to `high` with most samples per second.

    Args:
        look_at: returns the seconds of a step with this many samples, and anything else.
        low, high: the range.
    Raises:
        BudgetError: not even the smallest batch fits the budget, or it cannot be run on the device.
    Returns: what `look_at` has returned for the sizes that it was asked for and that fit; the fastest is among them.
    """
    try:
        measured = {low: look_at(low)}
    except MemoryError as error:
        raise BudgetError(f"A batch of {low} cannot be run on this device.") from error
    best, distance, too_large = low, high - low, high + 1
    while distance:
        for size in (best + distance, best - distance):
            if size in measured or not low <= size < too_large:
                continue
            try:
                measured[size] = look_at(size)
            except (MemoryError, BudgetError):  # fragments come on top of what is counted, and on a CPU kernel workspaces
                too_large = size
        best = find_fastest(measured)
        distance = -(-distance // 2) if distance > max(1, (high - low) // _PARTS) else 0
    return measured


def find_fastest(measured: Mapping[int, tuple[float, Any]]) -> int:
    """Return the batch size with most samples per second."""
    return max(measured, key=lambda size: size / measured[size][0])
