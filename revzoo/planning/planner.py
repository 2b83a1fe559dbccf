"""From a model and a budget to a plan: profile, solve, and count the planned training step before its peak is promised."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, Literal, get_args

import torch
from torch import nn

from revzoo.errors import BudgetError, InputError, UnknownNameError
from revzoo.format import format_bytes, format_seconds
from revzoo.planning.budget import parse_budget
from revzoo.planning.plan import Plan, Solver
from revzoo.planning.profiling.count import count_peak
from revzoo.planning.profiling.profile import Profile, profile
from revzoo.planning.profiling.timing import measure_step_seconds, measure_workspace, memory_errors
from revzoo.planning.profiling.trace import LossFunction
from revzoo.planning.setting import Setting
from revzoo.planning.solvers.knapsack import Baseline, solve_knapsack
from revzoo.planning.solvers.problem import Problem
from revzoo.planning.solvers.schedule import cost, list_phase_peaks, peak
from revzoo.planning.solvers.timeline import find_schedule, minimize_peak
from revzoo.runtime.lookahead_setting import LARGEST_RATIO, LookaheadOption, LookaheadSetting
from revzoo.runtime.mode import Mode


def profile_and_plan(
    model: nn.Module,
    batch: Any,
    budget: str | int,
    *,
    solver: Solver = "timeline",
    optimizer: torch.optim.Optimizer | None = None,
    loss: LossFunction | None = None,
    lookahead: LookaheadOption = 0,
    estimate: bool = False,
    other_bytes: int = 0,
    setting: Setting | None = None,
) -> tuple[Profile, Plan]:
    """Profile a model, solve for a budget and count the training step; return profile and plan. Raises as `plan` does.

    Args:
        model, batch, budget, solver, optimizer, loss, lookahead: as for `plan`.
        estimate: time only the minimum-memory schedule, as for `revzoo.profile`.
        other_bytes: other memory that is alive during the whole training step, such as averaged weights.
        setting: what the plan will hold for; None is the model and batch as they are now.
    """
    depth = LookaheadSetting(lookahead).option
    measured = profile(
        model,
        batch,
        optimizer,
        loss=loss,
        estimate=estimate,
        other_bytes=other_bytes,
        lookahead=depth != 0,
        budget=budget,
    )
    if setting is not None:
        measured = replace(measured, setting=setting)
    return measured, plan_from_profile(model, batch, measured, budget, solver, depth, loss)


def plan_from_profile(
    model: nn.Module,
    batch: Any,
    profile: Profile,
    budget: str | int,
    solver: Solver = "timeline",
    lookahead: LookaheadOption = 0,
    loss: LossFunction | None = None,
) -> Plan:
    """Return the fastest plan for a profiled model and batch, counted, and with look-ahead also timed.

    What look-ahead gains is measured by running the planned training step. The search knows what it takes, not what it gains:
    it assumes that the units gain alike, so that the cheapest schedule without look-ahead is the cheapest with it.

    Args:
        model, batch: what the profile is of.
        profile: with look-ahead counted, unless `lookahead` is 0.
        budget, solver, lookahead, loss: as for `plan`.
    Raises: as `solve` and `enforce_budget` do.
    """
    serial = None
    if lookahead != 1:
        serial = enforce_budget(model, batch, profile, solve(profile, budget, solver), loss)
    if serial is not None and (lookahead == 0 or not any(mode.drops for mode in serial.schedule)):
        return serial
    if serial is not None and profile.timing is None:
        return replace(serial, notes=(*serial.notes, "Nothing was timed, so nothing shows that look-ahead would gain."))
    try:
        ahead = enforce_budget(model, batch, profile, solve(profile, budget, solver, lookahead=1), loss)
        candidates = [plan for plan in (serial, ahead) if plan is not None]
        if profile.timing is None:
            return ahead
        with memory_errors():
            times = measure_step_seconds(model, batch, [(plan.schedule, plan.lookahead) for plan in candidates], loss)
    except (BudgetError, MemoryError):
        if serial is None:
            raise
        return replace(serial, notes=(*serial.notes, "No schedule with look-ahead could be run within the budget."))
    if serial is None:
        return replace(ahead, seconds=times[0].seconds, spread=times[0].spread)
    without, beside = (each.seconds for each in times)
    note = f"A training step takes {format_seconds(beside)} with look-ahead, {format_seconds(without)} without."
    best = int(beside < LARGEST_RATIO * without)
    return replace(
        candidates[best], seconds=times[best].seconds, spread=times[best].spread, notes=(*candidates[best].notes, note)
    )


def solve(
    profile: Profile,
    budget: str | int,
    solver: Solver = "timeline",
    *,
    baseline: Baseline = "peak",
    lookahead: Literal[0, 1] = 0,
) -> Plan:
    """Return the fastest schedule whose peak is within the budget.

    Args:
        profile: of the model, for the batch that is planned for.
        budget: limit for the peak of all memory together (weights, gradients, optimizer state, batch, activations): bytes,
            "8GiB", "60%" of the device's memory, or "auto", nine tenths of what is free.
        solver: "timeline" minimizes the time subject to the true peak, exactly. "knapsack" is the published additive model
            over storing and inverting, for comparison.
        baseline: for the knapsack, the bytes m_o that the paper adds stored steps to. "peak" is the peak of the step that
            inverts everything; "static" is what that step keeps from forward to backward, and such plans may exceed the budget.
        lookahead: how many steps are recovered ahead of backward. What 1 takes is part of every peak, what it gains is not
            predicted: the plan's seconds are those without.
    Raises:
        InputError: no such budget, or look-ahead is not part of the profile.
        UnknownNameError: no such solver or baseline.
        BudgetError: no schedule fits; names the smallest budget that would.
    Source: the knapsack is problem 6 of "An Efficient Training Framework for Reversible Neural Architectures" (Jiang et al.
        2020).
    """
    if baseline not in get_args(Baseline):
        raise UnknownNameError("baseline of the knapsack", baseline, get_args(Baseline))
    problem = _set_lookahead(profile.problem, lookahead)
    device = profile.setting.device.split()[0]
    limit = parse_budget(budget, device, profile.model_bytes)
    stored_peak = peak(problem, problem.all_stored)
    notes = list(profile.notes)
    modes: list[Mode] | None
    if solver == "timeline":
        modes = problem.all_stored
        if stored_peak > limit:
            schedule = find_schedule(problem, limit)
            modes = None if schedule is None else schedule.modes
            if schedule is not None and schedule.gap:
                reason = "there were too many partial solutions to compare them all"
                if any(option.left_bytes for unit in problem.units for option in unit.options):
                    reason = "autocast's casts of weights were counted during backward too"
                notes.append(
                    f"Of the work added to storing everything, at most {100 * schedule.gap:.2g} % could be saved: {reason}."
                )
    elif solver == "knapsack":
        modes = solve_knapsack(problem, limit, baseline)
        if modes is not None and problem.max_invert_run is not None and _longest_inverted_run(modes) > problem.max_invert_run:
            raise BudgetError(
                f"The knapsack inverts more than {problem.max_invert_run} steps in a row, which would lose too much precision. "
                "Try solver='timeline', or a larger budget."
            )
    else:
        raise UnknownNameError("solver", solver, get_args(Solver))
    min_peak, min_peak_modes = minimize_peak(problem)
    if modes is None:
        raise BudgetError(_explain_shortage(problem, limit, min_peak, min_peak_modes, solver))
    if modes == problem.all_stored:
        notes.append(f"Everything is stored: the budget is above the {format_bytes(stored_peak)} that this takes.")
    planned_peak = peak(problem, modes)
    if planned_peak == problem.update_peak:
        notes.append("The peak is at the optimizer's update.")
    if planned_peak > limit:
        notes.append(
            f"The budget is exceeded by {format_bytes(planned_peak - limit)}: the additive model does not see the peak."
        )
    return Plan(
        units=tuple(unit.name for unit in problem.units),
        schedule=tuple(modes),
        peak_bytes=planned_peak,
        budget_bytes=limit,
        seconds=profile.predict_seconds(modes),
        spread=None if profile.timing is None else profile.timing.spread,
        extra_flops=cost(profile.memory, modes),
        min_peak_bytes=min_peak,
        no_recompute_peak_bytes=stored_peak,
        phase_peaks=tuple(list_phase_peaks(problem, modes)),
        solver=solver,
        setting=profile.setting,
        max_invert_run=problem.max_invert_run,
        notes=tuple(notes),
        lookahead=lookahead,
    )


def _set_lookahead(problem: Problem, lookahead: Literal[0, 1]) -> Problem:
    if isinstance(lookahead, bool) or lookahead not in (0, 1):
        raise InputError(f'A profile is solved with lookahead 0 or 1. Received: {lookahead!r}. revzoo.plan takes "auto" too.')
    if lookahead and not problem.counts_lookahead:
        raise InputError("Look-ahead is not part of this profile. Make it with revzoo.profile(model, batch, lookahead=True).")
    return replace(problem, lookahead=lookahead)


def enforce_budget(model: nn.Module, batch: Any, profile: Profile, plan: Plan, loss: LossFunction | None = None) -> Plan:
    """Count the training step of a plan and return the plan with the counted peak; above the budget, plan for less first.

    A profile can predict too small a peak, for example one that was interpolated between batch sizes. Then the solver gets a
    limit that is lower than the predicted peak by the excess, until the counted peak of its plan is within the budget.

    Args:
        model: the model that the profile is of.
        batch: the batch that the profile is for.
        profile: to plan with again.
        plan: what `solve` returned for it.
        loss: computes the loss from what the model returns; None is a sum.
    Raises:
        BudgetError: no schedule has a counted peak within the budget.
    """
    limit = plan.budget_bytes
    while True:
        taken = {"other_bytes": profile.other_bytes, "update_bytes": profile.update_bytes}
        counted = count_peak(model, batch, plan.schedule, loss, **taken, lookahead=plan.lookahead)
        if profile.workspace_bytes:
            counted += max(profile.workspace_bytes, _measure_workspace(model, batch, profile, plan, loss))
        if counted <= plan.budget_bytes or plan.peak_bytes > limit:  # the latter is a knapsack plan, which says so in its notes
            return replace(plan, peak_bytes=counted)
        limit = plan.peak_bytes - (counted - plan.budget_bytes)
        try:
            plan = replace(solve(profile, limit, plan.solver, lookahead=plan.lookahead), budget_bytes=plan.budget_bytes)
        except BudgetError as error:
            raise BudgetError(
                f"No schedule fits {format_bytes(plan.budget_bytes)}: the planned training step has a counted peak of "
                f"{format_bytes(counted)}, and none saves the difference. Try a larger budget, or a smaller batch."
            ) from error


def _measure_workspace(model: nn.Module, batch: Any, profile: Profile, plan: Plan, loss: LossFunction | None) -> int:
    """Return the workspace of a plan's own training step, as far as that can be run."""
    try:
        return measure_workspace(model, batch, replace(profile.memory, lookahead=plan.lookahead), loss, plan.schedule)
    except MemoryError:
        return 0


def _longest_inverted_run(modes: Sequence[Mode]) -> int:
    return max((len(list(run)) for mode, run in groupby(modes) if mode.inverts), default=0)


def _explain_shortage(problem: Problem, limit: int, min_peak: int, min_peak_modes: Sequence[str], solver: Solver) -> str:
    """Return the message for a budget that no schedule fits: what is missing, and what would help."""
    if solver == "knapsack":
        return f"The knapsack has no schedule within {format_bytes(limit)}. Try solver='timeline', or a larger budget."
    worst = max(list_phase_peaks(problem, min_peak_modes), key=lambda phase: phase.bytes)
    where = "at the loss" if worst.phase == "loss" else f"in the {worst.phase} of {worst.name}"
    remedy, without = "Try a smaller batch, autocast, or an optimizer of less state.", ""
    if min_peak == problem.update_peak:
        where, remedy = "at the optimizer's update", "Try foreach=False, or an optimizer of less state."
    if problem.lookahead:
        least, _ = minimize_peak(replace(problem, lookahead=0))
        without = f" Without look-ahead (lookahead=0) {format_bytes(least)} are enough."
    return (
        f"No schedule fits {format_bytes(limit)}: at least {format_bytes(min_peak)} ({min_peak} bytes) are needed, {where}. Of "
        f"these {format_bytes(problem.fixed_bytes)} are weights, optimizer state and batch. {remedy}{without}"
    )
