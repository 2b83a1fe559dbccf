"""The batch size that trains most samples a second within a budget: a larger batch against a faster schedule.

Two profiles are measured. The bytes and seconds of every unit are interpolated between them over the batch size b, as m(b) =
m0 + b m1 and t(b) = t0 + b t1. Every candidate size is planned with the interpolated numbers. Times are not on a straight
line everywhere (caches, kernels for other sizes), so they are measured at the best size too and every size is predicted
again, until the best one is one whose times were measured. That one is run before it is recommended.

Source: problem 8 of "An Efficient Training Framework for Reversible Neural Architectures" (Jiang et al. 2020).
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, cast

import torch

from revzoo.errors import BudgetError, InputError
from revzoo.format import format_bytes, format_seconds
from revzoo.model.network import Model
from revzoo.planning.budget import free_bytes, parse_budget
from revzoo.planning.plan import Plan, Solver
from revzoo.planning.planner import plan_from_profile, solve
from revzoo.planning.profiling.count import count
from revzoo.planning.profiling.hooks import list_units
from revzoo.planning.profiling.inversion_limit import place_anchors
from revzoo.planning.profiling.profile import Profile, count_model_bytes, profile
from revzoo.planning.profiling.timing import Timing, measure_step_seconds, measure_timing, memory_errors
from revzoo.planning.profiling.trace import LossFunction
from revzoo.planning.setting import read_setting
from revzoo.planning.solvers.problem import Ahead, Option, Problem, Unit, tabulate
from revzoo.planning.solvers.schedule import peak
from revzoo.runtime.lookahead_setting import LookaheadOption, LookaheadSetting

_CANDIDATES = 32  # at most, evenly spaced
_STRETCH = 4  # the larger batch whose time is measured first is this multiple of the smallest
_MEASURED = 4  # at most so many sizes are measured after that


@dataclass(frozen=True)
class BatchRow:
    """The predicted time and memory of one batch size.

    Args:
        batch: the size.
        planned: seconds of a training step with the plan.
        stored: seconds with everything stored; None where that does not fit the budget.
        inverted: seconds with every step inverted; None where that does not fit the budget.
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
    """The best batch size and its plan, and the predictions for the other sizes.

    Args:
        batch: the best size.
        plan: for this size.
        seconds: of a training step with the plan, measured by running it.
        predicted_seconds: of the same training step, from the interpolated times.
        rows: every candidate size that fits the budget, rising.
    """

    batch: int
    plan: Plan
    seconds: float
    predicted_seconds: float
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
            f"{self.samples_per_second:.4g} samples a second ({format_seconds(self.seconds)} a training step measured, "
            f"{format_seconds(self.predicted_seconds)} predicted)"
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
        solver: "timeline" or "knapsack", as for `revzoo.solve`.
        optimizer: its state is part of every peak.
        loss: as for `revzoo.plan`.
        lookahead: as for `revzoo.plan`. "auto" compares the sizes without, and decides for the best one.
    Raises:
        InputError: not 1 <= low <= high, or a model without values, which cannot be timed.
        BudgetError: not even the smallest batch fits the budget, or no batch can be run on the device.
        RecoveryError: a step does not return the same output when it runs again.
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
    depth = LookaheadSetting(lookahead).option
    limit = parse_budget(budget, next(model.parameters()).device, count_model_bytes(model))
    profiles = _Interpolation(model, low, high, optimizer, depth, limit, loss)
    compared: Literal[0, 1] = 1 if depth == 1 else 0
    solve(profiles.at(low), limit, solver, lookahead=compared)  # raises BudgetError where not even this fits
    sizes = range(low, high + 1, -(-(high - low + 1) // _CANDIDATES))
    rows = tuple(_predict_rows(model, profiles, limit, sizes, solver, compared))
    for _ in range(_MEASURED):
        if not profiles.measure(min(rows, key=lambda row: row.planned / row.batch).batch):
            break
        rows = tuple(_predict_rows(model, profiles, limit, sizes, solver, compared))
    for row in sorted(rows, key=lambda row: row.planned / row.batch):
        try:
            with memory_errors():
                predicted, batch = profiles.at(row.batch), model.example_input(row.batch)
            plan = plan_from_profile(model, batch, predicted, limit, solver, depth, loss)
            ((seconds, spread),) = measure_step_seconds(model, batch, [(plan.schedule, plan.lookahead)], loss)
        except (MemoryError, BudgetError):
            continue  # the counted bytes fit, but fragments come on top, and on a CPU kernel workspaces
        return BatchPlan(row.batch, replace(plan, seconds=seconds, spread=spread), seconds, row.planned, rows)
    raise BudgetError(f"No batch from {low} to {high} could be run within {format_bytes(limit)} on this device.")


class _Interpolation:
    """A profile for any batch size: bytes on the straight line through two sizes, times on lines between all measured ones."""

    def __init__(
        self,
        model: Model,
        low: int,
        high: int,
        optimizer: torch.optim.Optimizer | None,
        lookahead: LookaheadOption,
        limit: int,
        loss: LossFunction | None = None,
    ):
        self._model, self._low, self._high, self._limit, self._loss = model, low, high, limit, loss
        self.small = profile(model, model.example_input(low), optimizer, loss=loss, lookahead=lookahead != 0, budget=limit)
        if self.small.timing is None:
            solve(self.small, limit)  # raises BudgetError where not even this fits
            raise BudgetError(f"A batch of {low} cannot be run on this device: {' '.join(self.small.notes)}")
        try:
            with memory_errors():
                largest = model.example_input(high)
        except MemoryError as error:
            raise InputError(f"A batch of {high} cannot even be allocated here. Search up to a smaller size.") from error
        taken = {"other_bytes": self.small.other_bytes, "update_bytes": self.small.update_bytes}
        self._large = (
            self._add_workspace(count(model, largest, loss, **taken, lookahead=lookahead != 0)) if high > low else None
        )
        self._timings = {low: self.small.timing}  # by size
        size = min(high, _STRETCH * low)
        while not self.measure(size) and size > low:
            size = (size + low) // 2
        if len(self._timings) == 1:  # times are then proportional to the size
            small = self.small.timing
            zeros = tuple(dict.fromkeys(extra, 0) for extra in small.extra)
            nothing = tuple(0.0 for _ in small.forward_seconds)
            self._timings[0] = replace(small, step_seconds=0.0, forward_seconds=nothing, extra=zeros)

    def measure(self, size: int) -> bool:
        """Measure the times of a batch size; return False if they are known, or if it cannot be run."""
        if size in self._timings:
            return False
        try:
            with memory_errors():
                batch = self._model.example_input(size)
            memory = self._add_workspace(count(self._model, batch, self._loss, self.small.other_bytes))
            allowance = min(self._limit, free_bytes(batch.device) + self.small.model_bytes)
            self._timings[size] = measure_timing(self._model, batch, memory, allowance, self._loss)
        except MemoryError:
            return False
        return True

    def _add_workspace(self, memory: Problem) -> Problem:
        return replace(memory, fixed_bytes=memory.fixed_bytes + self.small.workspace_bytes)

    def at(self, size: int) -> Profile:
        """Return the profile for a batch size."""
        memory, timing = self.small.memory, cast(Timing, self.small.timing)
        if self._large is not None:
            memory = _interpolate_problem(memory, self._large, _Line(self._low, self._high, size))
        known = sorted(self._timings)
        upper = min(max(1, bisect_left(known, size)), len(known) - 1)
        line = _Line(known[upper - 1], known[upper], size)
        lower, other = self._timings[line.low], self._timings[line.high]
        timing = replace(
            timing,
            step_seconds=line(lower.step_seconds, other.step_seconds),
            spread=max(lower.spread, other.spread),
            forward_seconds=tuple(map(line, lower.forward_seconds, other.forward_seconds)),
            extra=tuple(
                {variant: max(0, round(line(ns, more[variant]))) for variant, ns in extra.items()}
                for extra, more in zip(lower.extra, other.extra, strict=True)
            ),
        )
        setting = read_setting(self._model, self._model.example_input(size))
        return replace(self.small, memory=memory, timing=timing, setting=setting)


@dataclass(frozen=True)
class _Line:
    """The straight line through the values at batch sizes `low` and `high`, evaluated at a third size `at`."""

    low: int
    high: int
    at: int

    def __call__(self, low: float, high: float) -> float:
        return low + (high - low) * (self.at - self.low) / (self.high - self.low)

    def bytes(self, low: int, high: int) -> int:
        """Return the value in whole bytes, rounded up."""
        return low - (low - high) * (self.at - self.low) // (self.high - self.low)

    def table(self, low: Sequence[int], high: Sequence[int]) -> Sequence[int]:
        """Return the same for every subset of a unit's inputs."""
        return tabulate(len(low).bit_length() - 1, lambda subset: self.bytes(low[subset], high[subset]))


def _interpolate_problem(low: Problem, high: Problem, line: _Line) -> Problem:
    """Return the problem of a third batch size. Units, states and what units keep do not depend on the size."""

    def option(a: Option, b: Option) -> Option:
        return replace(
            a,
            kept_bytes=line.bytes(a.kept_bytes, b.kept_bytes),
            forward_bytes=line.bytes(a.forward_bytes, b.forward_bytes),
            backward_bytes=line.table(a.backward_bytes, b.backward_bytes),
            cost=line.bytes(a.cost, b.cost),
            made_bytes=line.bytes(a.made_bytes, b.made_bytes),
            freed_bytes=line.bytes(a.freed_bytes, b.freed_bytes),
            left_bytes=line.bytes(a.left_bytes, b.left_bytes),
            ahead=None if a.ahead is None or b.ahead is None else ahead(a.ahead, b.ahead),
        )

    def ahead(a: Ahead, b: Ahead) -> Ahead:
        recovery = a.recovery
        if a.recovery is not None and b.recovery is not None:
            peak_bytes = line.bytes(a.recovery.peak_bytes, b.recovery.peak_bytes)
            left_bytes = line.bytes(a.recovery.left_bytes, b.recovery.left_bytes)
            recovery = replace(a.recovery, peak_bytes=peak_bytes, left_bytes=left_bytes)
        return Ahead(
            before_bytes=line.table(a.before_bytes, b.before_bytes),
            during_bytes=line.table(a.during_bytes, b.during_bytes),
            after_bytes=line.table(a.after_bytes, b.after_bytes),
            paired_bytes=line.table(a.paired_bytes, b.paired_bytes),
            recovery=recovery,
        )

    def unit(a: Unit, b: Unit) -> Unit:
        first = None if a.first is None or b.first is None else option(a.first, b.first)
        in_runs = tuple(map(option, a.in_runs, b.in_runs))
        return replace(a, options=tuple(map(option, a.options, b.options)), first=first, in_runs=in_runs)

    return replace(
        low,
        units=tuple(map(unit, low.units, high.units)),
        sizes={state: line.bytes(size, high.sizes[state]) for state, size in low.sizes.items()},
        fixed_bytes=line.bytes(low.fixed_bytes, high.fixed_bytes),
        loss_bytes=line.bytes(low.loss_bytes, high.loss_bytes),
        update_bytes=line.bytes(low.update_bytes, high.update_bytes),
    )


def _predict_rows(
    model: Model, profiles: _Interpolation, limit: int, sizes: range, solver: Solver, lookahead: Literal[0, 1]
) -> Iterator[BatchRow]:
    """Yield a row for each size, up to the first that does not fit."""
    entries = list_units(model)
    for size in sizes:
        predicted = profiles.at(size)
        try:
            plan = solve(predicted, limit, solver, lookahead=lookahead)
        except BudgetError:
            return

        def seconds(modes: Sequence[str], predicted: Profile = predicted) -> float | None:
            problem = replace(predicted.problem, lookahead=lookahead)
            return predicted.predict_seconds(modes) if peak(problem, modes) <= limit else None

        yield BatchRow(
            batch=size,
            planned=cast(float, plan.seconds),
            stored=seconds(predicted.memory.all_stored),
            inverted=seconds(place_anchors(entries, predicted.memory.max_invert_run)),
            peak_bytes=plan.peak_bytes,
            schedule=plan.schedule,
        )
