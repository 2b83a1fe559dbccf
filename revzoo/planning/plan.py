"""Stages three and four of planning: the fastest schedule that fits, and putting it to work."""

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, cast, get_args

import torch
from torch import nn

from revzoo.errors import BudgetError, PlanError, UnknownNameError
from revzoo.format import format_bytes
from revzoo.planning.budget import budget_bytes
from revzoo.planning.profiling.count import count_peak
from revzoo.planning.profiling.hooks import PlannableModel, units
from revzoo.planning.profiling.profile import Profile, profile
from revzoo.planning.profiling.trace import Loss
from revzoo.planning.setting import Setting, setting
from revzoo.planning.solvers.knapsack import Baseline, solve_knapsack
from revzoo.planning.solvers.problem import PhasePeak, Problem, cost, list_phase_peaks, peak
from revzoo.planning.solvers.timeline import minimize_peak
from revzoo.planning.solvers.timeline import solve as solve_timeline
from revzoo.runtime.schedule import Mode

Solver = Literal["timeline", "knapsack"]


@dataclass(frozen=True)
class Plan:
    """A schedule for one model, batch and device, and what it will take.

    `model.schedule = plan` and `plan.apply(model)` are the same.

    Args:
        units: names of the steps and nodes.
        schedule: their modes.
        peak_bytes: everything alive at the peak, as `revzoo.measure_memory` counts it.
        budget_bytes: what it was to fit.
        seconds: of one forward and backward; None where nothing was run.
        extra_flops: of one forward and backward, over storing everything.
        min_peak_bytes: peak of the leanest schedule there is.
        no_recompute_peak_bytes: peak of storing everything.
        moments: the peak within each unit's forward, the loss, and each unit's backward, in order.
        solver: "timeline" or "knapsack".
        setting: what it holds for.
        max_invert_run: most steps inverted in a row; None is any number.
        notes: what a reader should know.
    """

    units: tuple[str, ...]
    schedule: tuple[Mode, ...]
    peak_bytes: int
    budget_bytes: int
    seconds: float | None
    extra_flops: int
    min_peak_bytes: int
    no_recompute_peak_bytes: int
    moments: tuple[PhasePeak, ...]
    solver: Solver
    setting: Setting
    max_invert_run: int | None = None
    notes: tuple[str, ...] = ()

    def apply(self, model: nn.Module, batch: Any = None) -> None:
        """Give the model this schedule.

        Args:
            batch: is compared with the one planned for, where given.
        Raises:
            PlanError: model, dtype, device, mode of training or batch are not those it was made for; says which.
        """
        found = setting(model, batch)
        reasons = list(self.setting.differences(found))
        if not reasons and self.units != tuple(part.name for part in units(model)):
            reasons = ["other units than the model has"]
        if reasons:
            raise PlanError(f"This plan is for {'; '.join(reasons)}. Make a new one with revzoo.plan(model, batch, budget).")
        model.schedule = list(self.schedule)  # type: ignore[assignment]

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON."""
        Path(path).write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> "Plan":
        """Read a plan.

        Raises:
            PlanError: there is no such file, or it is not a plan.
        """
        try:
            facts = json.loads(Path(path).read_text())
            lists = {key: tuple(facts[key]) for key in ("units", "schedule", "notes")}
            moments = tuple(PhasePeak(**moment) for moment in facts["phase_peaks"])
            where = Setting(**{**facts["setting"], "batch": tuple(facts["setting"]["batch"])})
            found = cls(**{**facts, **lists, "phase_peaks": moments, "setting": where})
            found._check()
        except (OSError, ValueError, TypeError, LookupError, RecursionError) as error:
            raise PlanError(
                f"{path} is not a saved plan ({error}). revzoo plan NAME --budget SIZE --out FILE writes one."
            ) from error
        return found

    def _check(self) -> None:
        """Raise ValueError for what `save` never writes."""
        sizes = (self.peak_bytes, self.budget_bytes, self.min_peak_bytes, self.no_recompute_peak_bytes, self.extra_flops)
        if not all(type(size) is int and size >= 0 for size in (*sizes, *(moment.bytes for moment in self.phase_peaks))):
            raise ValueError("its bytes and FLOPs are not all whole numbers")
        if not (self.seconds is None or (type(self.seconds) in (int, float) and math.isfinite(self.seconds))):
            raise ValueError("its seconds are no number")
        if not all(isinstance(text, str) for text in (*self.units, *self.notes, *self.setting.batch)):
            raise ValueError("its names are not all texts")
        if self.solver not in get_args(Solver) or not set(self.schedule) <= set(get_args(Mode)):
            raise ValueError("it has an unknown solver or mode")
        if not (self.max_invert_run is None or (type(self.max_invert_run) is int and self.max_invert_run >= 0)):
            raise ValueError("its longest run is no number")
        if len(self.units) != len(self.schedule) or len(self.phase_peaks) != 2 * len(self.units) + 1:
            raise ValueError(f"it has {len(self.units)} units, {len(self.schedule)} modes and {len(self.phase_peaks)} moments")

    def __str__(self) -> str:
        counts = Counter(self.schedule)
        modes = ", ".join(f"{counts[mode]} {mode}" for mode in get_args(Mode) if counts[mode])
        lines = [
            f"{self.setting.model}, batch of {', '.join(self.setting.batch)}, {self.setting.dtype} on {self.setting.device}",
            f"peak {format_bytes(self.peak_bytes)} of {format_bytes(self.budget_bytes)} "
            f"(all stored {format_bytes(self.no_recompute_peak_bytes)}, leanest {format_bytes(self.min_peak_bytes)})",
            f"{modes}; {self._price()}",
            *self.notes,
        ]
        return "\n".join(lines)

    def _price(self) -> str:
        return f"{self.extra_flops:.2e} FLOPs more than storing" if self.seconds is None else f"{self.seconds:.4g} s a step"


def solve(profile: Profile, budget: str | int, solver: Solver = "timeline", *, reading: Baseline = "peak") -> Plan:
    """Return the fastest schedule whose peak is within the budget.

    Args:
        budget: bytes of everything together (weights, gradients, optimizer state, batch, activations), "8GiB", "60%" of the
            device's memory, or "auto", nine tenths of what is free.
        solver: "timeline" minimises the time subject to the true peak, exactly. "knapsack" is the published additive model
            over storing and inverting, for comparison.
        reading: for the knapsack, what the paper's m_o is: "peak", that of the all-inverted step, or "static", what is
            alive besides activations, with which plans may exceed the budget.
    Raises:
        InputError: no such budget.
        UnknownNameError: no such solver.
        BudgetError: nothing fits; names the least that would.
    Source: the knapsack is problem 6 of "An Efficient Training Framework for Reversible Neural Architectures" (Jiang et al.
        2020).
    """
    problem = profile.problem
    device = profile.setting.device.split()[0]
    limit = budget_bytes(budget, device, profile.model_bytes)
    stored = peak(problem, ["store"] * len(problem.units))
    if solver == "timeline":
        modes = ["store"] * len(problem.units) if stored <= limit else solve_timeline(problem, limit)
    elif solver == "knapsack":
        modes = solve_knapsack(problem, limit, reading)
        if modes is not None and problem.max_invert_run is not None and _longest_run(modes) > problem.max_invert_run:
            raise BudgetError(
                f"The knapsack inverts more than {problem.max_invert_run} steps in a row, and more would round too much away. "
                "Try solver='timeline', or a larger budget."
            )
    else:
        raise UnknownNameError("solver", solver, get_args(Solver))
    least, leanest = minimize_peak(problem)
    if modes is None:
        raise BudgetError(_too_small(problem, limit, least, leanest, solver))
    notes = list(profile.notes)
    if set(modes) == {"store"}:
        notes.append(f"Everything is stored: the budget is above the {format_bytes(stored)} that this takes.")
    found = peak(problem, modes)
    if found > limit:
        notes.append(f"The budget is exceeded by {format_bytes(found - limit)}: the additive model does not see the peak.")
    return Plan(
        units=tuple(unit.name for unit in problem.units),
        schedule=cast(tuple[Mode, ...], tuple(modes)),
        peak_bytes=found,
        budget_bytes=limit,
        seconds=None if profile.timing is None else profile.timing.step_seconds + cost(problem, modes) / 1e9,
        extra_flops=cost(profile.memory, modes),
        min_peak_bytes=least,
        no_recompute_peak_bytes=stored,
        phase_peaks=tuple(list_phase_peaks(problem, modes)),
        solver=solver,
        setting=profile.setting,
        max_invert_run=problem.max_invert_run,
        notes=tuple(notes),
    )


def plan(
    model: PlannableModel,
    batch: Any,
    budget: str | int,
    *,
    solver: Solver = "timeline",
    optimizer: torch.optim.Optimizer | None = None,
    loss: Loss | None = None,
) -> Plan:
    """Profile a model, solve, and count the planned step once more before promising its peak.

    Args:
        model: a `revzoo.Model` or a `ReversibleChain`, in the state in which it is to be trained.
        batch: a tensor, a tuple or list of positional arguments, or a mapping of keyword arguments.
        budget: as for `revzoo.solve`.
        solver: as there.
        optimizer: its state is part of every peak.
        loss: of what the model returns; None is a sum, which keeps nothing.
    Raises:
        InputError: a model, batch, optimizer or budget that cannot be planned.
        BudgetError: nothing fits; names the least that would.
        RecoveryError: a step does not repeat itself.
    """
    found = profile(model, batch, optimizer, loss=loss)
    return checked(model, batch, found, solve(found, budget, solver), loss)


def checked(model: nn.Module, batch: Any, profile: Profile, found: Plan, loss: Loss | None = None) -> Plan:
    """Count the planned step, and plan anew with less where it takes more than was foreseen and than the budget."""
    limit = found.budget_bytes
    while True:
        real = count_peak(model, batch, found.schedule, loss, profile.other_bytes)
        if real <= found.budget_bytes or found.peak_bytes > limit:
            return replace(found, peak_bytes=real)
        limit -= real - found.budget_bytes
        try:
            found = replace(solve(profile, limit, found.solver), budget_bytes=found.budget_bytes)
        except BudgetError as error:
            raise BudgetError(
                f"Nothing fits {format_bytes(found.budget_bytes)}: the leanest step takes {format_bytes(real)}, counted."
            ) from error


def _longest_run(modes: Sequence[str]) -> int:
    return max((len(list(group)) for mode, group in groupby(modes) if mode == "invert"), default=0)


def _too_small(problem: Problem, limit: int, least: int, leanest: Sequence[str], solver: Solver) -> str:
    """Return what is missing, and what would help."""
    if solver == "knapsack":
        return f"The knapsack has no schedule within {format_bytes(limit)}. Try solver='timeline', or a larger budget."
    worst = max(list_phase_peaks(problem, leanest), key=lambda moment: moment.bytes)
    where = "at the loss" if worst.phase == "loss" else f"in the {worst.phase} of {worst.name}"
    return (
        f"Nothing fits {format_bytes(limit)}: at least {format_bytes(least)} ({least} bytes) are needed, {where}. Of these "
        f"{format_bytes(problem.fixed_bytes)} are weights, optimizer state and batch. Try a smaller batch, autocast, or an "
        "optimizer of less state."
    )
