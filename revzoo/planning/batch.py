"""The batch size that trains most samples a second within a budget: a larger batch against a faster schedule.

Bytes and seconds of every unit are fitted over the batch size b, m(b) = m0 + b m1 and t(b) = t0 + b t1, from two profiles;
every candidate is planned with the fitted numbers, and the best one is run before it is recommended.

Source: problem 8 of "An Efficient Training Framework for Reversible Neural Architectures" (Jiang et al. 2020).
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

import torch

from revzoo.errors import BudgetError, InputError
from revzoo.format import format_bytes
from revzoo.model.network import Model
from revzoo.planning.anchor import anchored
from revzoo.planning.budget import budget_bytes, free_bytes
from revzoo.planning.clock import Times, measured_times, memory_errors, step_seconds
from revzoo.planning.count import count
from revzoo.planning.hooks import units
from revzoo.planning.plan import Plan, Solver, checked, solve
from revzoo.planning.problem import Option, Problem, Unit, cost, peak
from revzoo.planning.profile import Profile, profile
from revzoo.planning.setting import setting

_CANDIDATES = 32  # at most, evenly spaced
_STRETCH = 4  # the second batch that is timed is so many times the smallest


@dataclass(frozen=True)
class BatchRow:
    """One batch size, as foreseen; what does not fit the budget has no seconds.

    Args:
        schedule: the plan's.
        planned, stored, inverted: seconds of a step under the plan, with all stored, and with every step inverted.
        peak_bytes: of the plan.
    """

    batch: int
    planned: float
    stored: float | None
    inverted: float | None
    peak_bytes: int
    schedule: tuple[str, ...]


@dataclass(frozen=True)
class BatchPlan:
    """The best batch size, its plan, and what was foreseen for the others.

    Args:
        seconds: of a step with the plan, measured by running it.
        foreseen_seconds: the same from the fit.
        rows: every candidate that fits, by size.
    """

    batch: int
    plan: Plan
    seconds: float
    foreseen_seconds: float
    rows: tuple[BatchRow, ...]

    @property
    def samples_per_second(self) -> float:
        """Forward and backward of so many samples, as run."""
        return self.batch / self.seconds

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain data."""
        return {**asdict(self), "samples_per_second": self.samples_per_second}

    def __str__(self) -> str:
        return (
            f"{self.plan}\nbatch {self.batch} of {self.rows[0].batch} to {self.rows[-1].batch} is best: "
            f"{self.samples_per_second:.4g} samples a second ({self.seconds:.4g} s a step as run, "
            f"{self.foreseen_seconds:.4g} s foreseen)"
        )


def best_batch(
    model: Model,
    budget: str | int,
    low: int,
    high: int,
    *,
    solver: Solver = "timeline",
    optimizer: torch.optim.Optimizer | None = None,
) -> BatchPlan:
    """Return the batch size from `low` to `high` with most samples per second within the budget, with its plan.

    Args: as `revzoo.plan`; low, high: batch sizes, both included.
    Raises:
        InputError: not 1 <= low <= high, or a model without values, which cannot be timed.
        BudgetError: not even the smallest batch fits, or can be run.
        RecoveryError: a step does not repeat itself.
    """
    if not isinstance(model, Model):
        raise InputError(
            f"Batches are made with model.example_input. Received: {type(model).__name__}. Use revzoo.plan for each."
        )
    if not (type(low) is type(high) is int and 1 <= low <= high):
        raise InputError(f"Batch sizes go from a number >= 1 to one that is no smaller. Received: {low} to {high}.")
    if any(p.is_meta for p in model.parameters()):
        raise InputError("The best batch is a matter of seconds. Received: a model on the meta device. Make it on a real one.")
    fit = _Fit(model, low, high, optimizer)
    limit = budget_bytes(budget, fit.small.setting.device.split()[0], fit.small.model_bytes)
    solve(fit.at(low), limit, solver)  # says what is missing where nothing fits
    rows = tuple(_rows(model, fit, limit, range(low, high + 1, -(-(high - low + 1) // _CANDIDATES)), solver))
    for row in sorted(rows, key=lambda row: row.planned / row.batch):
        try:
            with memory_errors():
                found, batch = fit.at(row.batch), model.example_input(row.batch)
            chosen = checked(model, batch, found, solve(found, limit, solver))
            seconds = step_seconds(model, batch, chosen.schedule)
        except (MemoryError, BudgetError):
            continue  # the counted bytes fit, but not what the device adds to them
        return BatchPlan(row.batch, replace(chosen, seconds=seconds), seconds, row.planned, rows)
    raise BudgetError(f"No batch from {low} to {high} could be run within {format_bytes(limit)} on this device.")


class _Fit:
    """A profile for any batch size, on the line through two of them."""

    def __init__(self, model: Model, low: int, high: int, optimizer: torch.optim.Optimizer | None):
        self._model, self._low, self._high = model, low, high
        self.small = profile(model, model.example_input(low), optimizer)
        if self.small.times is None:
            raise BudgetError(f"A batch of {low} cannot be run on this device: {' '.join(self.small.notes)}")
        try:
            with memory_errors():
                largest = model.example_input(high)
        except MemoryError as error:
            raise InputError(f"A batch of {high} cannot even be made here. Look up to a smaller one.") from error
        self._large = count(model, largest, other_bytes=self.small.other_bytes) if high > low else None
        self._timed_at, self._times = self._second_times(min(high, _STRETCH * low))

    def _second_times(self, size: int) -> tuple[int, Times]:
        """Return a larger batch size that can be run, and its times; where there is none, nothing at size 0."""
        while size > self._low:
            batch = self._model.example_input(size)
            counted = count(self._model, batch, other_bytes=self.small.other_bytes)
            try:
                return size, measured_times(self._model, batch, counted, free_bytes(batch.device) + self.small.model_bytes)
            except MemoryError:
                size = (size + self._low) // 2
        small = cast(Times, self.small.times)
        nothing = tuple(dict.fromkeys(extra, 0) for extra in small.extra)
        return 0, replace(small, step_seconds=0.0, forward_seconds=tuple(0.0 for _ in small.forward_seconds), extra=nothing)

    def at(self, size: int) -> Profile:
        """Return the profile for a batch size."""
        counted, times = self.small.counted, cast(Times, self.small.times)
        if self._large is not None:
            counted = _between(counted, self._large, _Line(self._low, self._high, size))
        line = _Line(self._low, self._timed_at, size)
        times = replace(
            times,
            step_seconds=line(times.step_seconds, self._times.step_seconds),
            forward_seconds=tuple(map(line, times.forward_seconds, self._times.forward_seconds)),
            extra=tuple(
                {variant: max(0, round(line(ns, other[variant]))) for variant, ns in extra.items()}
                for extra, other in zip(times.extra, self._times.extra, strict=True)
            ),
        )
        return replace(self.small, counted=counted, times=times, setting=setting(self._model, self._model.example_input(size)))


@dataclass(frozen=True)
class _Line:
    """The straight line through the values at two batch sizes, looked at in a third."""

    low: int
    high: int
    at: int

    def __call__(self, low: float, high: float) -> float:
        return low + (high - low) * (self.at - self.low) / (self.high - self.low)

    def bytes(self, low: int, high: int) -> int:
        """Return whole bytes, rounded up."""
        return low - (low - high) * (self.at - self.low) // (self.high - self.low)


def _between(low: Problem, high: Problem, line: _Line) -> Problem:
    """Return the problem of a third batch size; units, states and what is held are the same for all."""

    def option(a: Option, b: Option) -> Option:
        return replace(
            a,
            kept_bytes=line.bytes(a.kept_bytes, b.kept_bytes),
            forward_bytes=line.bytes(a.forward_bytes, b.forward_bytes),
            backward_bytes=tuple(map(line.bytes, a.backward_bytes, b.backward_bytes)),
            cost=line.bytes(a.cost, b.cost),
            made_bytes=line.bytes(a.made_bytes, b.made_bytes),
        )

    def unit(a: Unit, b: Unit) -> Unit:
        first = None if a.first is None or b.first is None else option(a.first, b.first)
        return replace(a, options=tuple(map(option, a.options, b.options)), first=first)

    return replace(
        low,
        units=tuple(map(unit, low.units, high.units)),
        sizes={state: line.bytes(size, high.sizes[state]) for state, size in low.sizes.items()},
        fixed_bytes=line.bytes(low.fixed_bytes, high.fixed_bytes),
        loss_bytes=line.bytes(low.loss_bytes, high.loss_bytes),
    )


def _rows(model: Model, fit: _Fit, limit: int, sizes: range, solver: Solver) -> Iterator[BatchRow]:
    """Yield the sizes that fit."""
    parts = units(model)
    for size in sizes:
        found = fit.at(size)
        try:
            chosen = solve(found, limit, solver)
        except BudgetError:
            return
        problem, base = found.problem, cast(Times, found.times).step_seconds

        def seconds(modes: Sequence[str], problem: Problem = problem, base: float = base) -> float | None:
            return base + cost(problem, modes) / 1e9 if peak(problem, modes) <= limit else None

        yield BatchRow(
            batch=size,
            planned=cast(float, chosen.seconds),
            stored=seconds(["store"] * len(parts)),
            inverted=seconds(anchored(parts, problem.max_invert_run)),
            peak_bytes=chosen.peak_bytes,
            schedule=chosen.schedule,
        )
