"""From a model and a budget to a plan: profile, solve, and count the planned training step before its peak is promised."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from operator import attrgetter
from typing import Any, Literal, get_args

import torch
from torch import nn

from revzoo.analysis.chains import assign_tiles, find_block_chains, preserve_schedules, read_tiles
from revzoo.analysis.dry_run import LossFunction, memory_errors
from revzoo.analysis.tiles import choose_tiles
from revzoo.errors import BudgetError, InputError, UnknownNameError
from revzoo.format import format_bytes
from revzoo.planning.budget import count_model_bytes, parse_budget
from revzoo.planning.plan import Plan
from revzoo.planning.profiling.count import count_peak
from revzoo.planning.profiling.hooks import assign_schedule, list_units
from revzoo.planning.profiling.inversion_limit import place_anchors
from revzoo.planning.profiling.profile import Profile, profile
from revzoo.planning.profiling.timing import measure_step_seconds, measure_workspace
from revzoo.planning.setting import Setting
from revzoo.planning.solvers import Solver
from revzoo.planning.solvers.knapsack import solve_knapsack
from revzoo.planning.solvers.problem import Problem
from revzoo.planning.solvers.schedule_totals import cost, list_phase_peaks, peak
from revzoo.planning.solvers.timeline import find_schedule, minimize_peak
from revzoo.runtime.layout import get_tiles, set_tiles
from revzoo.runtime.lookahead import LookaheadOption, check_lookahead
from revzoo.runtime.mode import Mode

_PLENTY = 2**60  # a budget for which everything is stored
_TILES_HELP = " Where that is a step, tiles may lower the peak: tiles='auto'."


def profile_and_plan(
    model: nn.Module,
    batch: Any,
    budget: str | int,
    *,
    solver: Solver = "timeline",
    optimizer: torch.optim.Optimizer | None = None,
    loss: LossFunction | None = None,
    lookahead: LookaheadOption = 0,
    tiles: Literal["auto"] | None = None,
    other_bytes: int = 0,
    setting: Setting | None = None,
) -> tuple[Profile, Plan]:
    """Profile a model, solve for a budget and count the training step; return profile and plan. Raises as `plan` does.

    Args:
        model, batch, budget, solver, optimizer, loss, lookahead, tiles: as for `plan`.
        other_bytes: other memory that is alive during the whole training step, such as averaged weights.
        setting: what the plan will hold for, besides tiles; None is the model and batch as they are now.
    """
    if tiles is not None:
        if tiles != "auto" or solver != "timeline" or lookahead != 0:
            raise InputError(
                "tiles is None for those of the model, or 'auto' with solver='timeline' and lookahead=0. Received: "
                f"{tiles!r}, solver={solver!r}, lookahead={lookahead!r}."
            )
        taken = {"optimizer": optimizer, "other_bytes": other_bytes, "setting": setting}
        return _plan_with_tiles(model, batch, budget, loss, **taken)
    if check_lookahead(lookahead) and find_block_chains(model):
        raise InputError(
            "Blocks that were made reversible in place are recovered one by one. Received: lookahead=1. Plan with lookahead=0."
        )
    measured = profile(model, batch, optimizer, loss=loss, other_bytes=other_bytes, budget=budget)
    if setting is not None:
        measured = replace(measured, setting=replace(setting, tiles=measured.setting.tiles))
    limit = parse_budget(budget, measured.setting.device.split()[0], measured.model_bytes)
    # Predicted peaks know of no look-ahead, and those of inverted layers may be too high: the least is counted for these.
    is_inexact = bool(lookahead) or any(entry.kind == "layer" for entry in list_units(model))
    least = _plan_least(model, batch, measured, limit, lookahead, loss) if is_inexact else None
    try:
        planned = replace(solve(measured, limit, solver), lookahead=lookahead)
        planned = enforce_budget(model, batch, measured, planned, loss)
    except BudgetError as error:
        if solver != "timeline" or least is None:
            raise
        if least.peak_bytes > limit:
            hint = " Or plan with lookahead=0." * lookahead
            message = _explain_shortage(measured.problem, limit, least.peak_bytes, least.schedule, solver)
            raise BudgetError(message + hint) from error
        planned = least
    smallest = planned.min_peak_bytes if least is None else least.peak_bytes
    planned = replace(planned, min_peak_bytes=min(smallest, planned.peak_bytes))
    stores_all = list(planned.schedule) == measured.memory.all_stored  # then there is nothing to recover ahead, nor to weigh
    if (lookahead or measured.timing is None) and not stores_all:
        planned = _time_step(model, batch, planned, loss)
    return measured, planned


def _plan_with_tiles(
    model: nn.Module, batch: Any, budget: str | int, loss: LossFunction | None, **taken: Any
) -> tuple[Profile, Plan]:
    """Return the faster of the plan of whole steps and that of steps cut into tiles, with its profile."""
    units, limit = list_units(model), parse_budget(budget, next(model.parameters()).device, count_model_bytes(model))
    made, refusals = list[tuple[Profile, Plan]](), list[BudgetError]()
    with preserve_schedules(model):
        set_tiles(units, 1)
        for is_whole in (True, False):
            try:
                measured, planned = profile_and_plan(model, batch, limit, loss=loss, **taken)
            except BudgetError as error:
                refusals.append(error)
            else:
                if not is_whole:
                    planned = _make_stored_whole(model, batch, measured, planned, loss)
                elif list(planned.schedule) == measured.memory.all_stored:
                    return measured, planned
                made.append((measured, _time_step(model, batch, planned, loss)))
            if is_whole:
                assign_schedule(model, [unit.modes[-1] for unit in units])  # where least is kept, tiles lower the peak most
                choose_tiles(model, batch, loss=loss)
                if max(read_tiles(model)) == 1:
                    break
    if not made:
        raise BudgetError(str(refusals[-1]).removesuffix(_TILES_HELP)) from refusals[-1]  # with tiles, if any were chosen
    cost_of = attrgetter("seconds" if all(planned.seconds is not None for _, planned in made) else "extra_flops")
    measured, planned = min(made, key=lambda each: cost_of(each[1]))
    return measured, replace(planned, min_peak_bytes=min(each.min_peak_bytes for _, each in made))


def _make_stored_whole(model: nn.Module, batch: Any, profile: Profile, plan: Plan, loss: LossFunction | None) -> Plan:
    """Return the plan with the steps that it stores whole, as the model has them then, where that is within the budget."""
    units, cut = list_units(model), read_tiles(model)
    set_tiles(units, [n if mode.drops else 1 for n, mode in zip(get_tiles(units), plan.schedule, strict=True)])
    counted = _count(model, batch, profile, plan, loss)
    if counted > plan.budget_bytes:
        assign_tiles(model, cut)
        return plan
    setting = replace(plan.setting, tiles=read_tiles(model))
    return replace(plan, setting=setting, peak_bytes=counted, min_peak_bytes=min(plan.min_peak_bytes, counted))


def _plan_least(
    model: nn.Module, batch: Any, profile: Profile, limit: int, lookahead: LookaheadOption, loss: LossFunction | None
) -> Plan:
    """Return the plan whose counted peak is lower: that of the smallest predicted peak, or that which inverts all it can."""
    stored, found = solve(profile, _PLENTY), []
    for modes in (minimize_peak(profile.problem)[1], place_anchors(list_units(model), profile.memory.max_invert_run)):
        plan = replace(
            stored,
            schedule=tuple(modes),
            budget_bytes=limit,
            lookahead=lookahead,
            seconds=profile.predict_seconds(modes),
            extra_flops=cost(profile.memory, modes),
            phase_peaks=tuple(list_phase_peaks(profile.problem, modes)),
            notes=profile.notes,
        )
        found.append(replace(plan, peak_bytes=_count(model, batch, profile, plan, loss)))
    return min(found, key=attrgetter("peak_bytes"))


def _time_step(model: nn.Module, batch: Any, plan: Plan, loss: LossFunction | None) -> Plan:
    """Return the plan with measured seconds: neither the gain of look-ahead nor, without timed units, any time is predicted."""
    if any(p.is_meta for p in model.parameters()):
        return plan
    try:
        with memory_errors():
            seconds, spread = measure_step_seconds(model, batch, plan.schedule, loss, plan.lookahead)
    except MemoryError as error:
        if not plan.lookahead:
            return plan
        raise BudgetError("With look-ahead the planned training step runs out of memory. Plan with lookahead=0.") from error
    return replace(plan, seconds=seconds, spread=spread)


def solve(profile: Profile, budget: str | int, solver: Solver = "timeline") -> Plan:
    """Return the fastest schedule whose peak is within the budget.

    Args:
        profile: of the model, for the batch that is planned for.
        budget: limit for the peak of all memory together (weights, gradients, optimizer state, batch, activations): bytes,
            "8GiB", "60%" of the device's memory, or "auto", nine tenths of what is free.
        solver: "timeline" minimizes the time subject to the true peak, exactly. "knapsack" is the published additive model
            over storing and inverting, for comparison.
    Raises:
        InputError: no such budget.
        UnknownNameError: no such solver.
        BudgetError: no schedule fits; names the smallest budget that would.
    Source: the knapsack is problem 6 of "An Efficient Training Framework for Reversible Neural Architectures" (Jiang et al.
        2020).
    """
    problem, device = profile.problem, profile.setting.device.split()[0]
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
        modes = solve_knapsack(problem, limit)
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
    )


def enforce_budget(model: nn.Module, batch: Any, profile: Profile, plan: Plan, loss: LossFunction | None = None) -> Plan:
    """Count the training step of a plan and return the plan with the counted peak; above the budget, plan for less first.

    A profile can predict too small a peak, and look-ahead takes memory that it does not know of. Then the solver gets a limit
    that is lower than the predicted peak by the excess, until the counted peak of its plan is within the budget.

    Args:
        model: the model that the profile is of.
        batch: the batch that the profile is for.
        profile: to plan with again.
        plan: what `solve` returned for it, with the look-ahead that it will have.
        loss: computes the loss from what the model returns; None is a sum.
    Raises:
        BudgetError: no schedule has a counted peak within the budget.
    """
    limit = plan.budget_bytes
    while True:
        counted = _count(model, batch, profile, plan, loss)
        if counted <= plan.budget_bytes or plan.peak_bytes > limit:  # the latter is a knapsack plan, which says so in its notes
            return replace(plan, peak_bytes=counted)
        limit = plan.peak_bytes - (counted - plan.budget_bytes)
        try:
            smaller = solve(profile, limit, plan.solver)
        except BudgetError as error:
            raise BudgetError(
                f"No schedule fits {format_bytes(plan.budget_bytes)}: the planned training step has a counted peak of "
                f"{format_bytes(counted)}, and none saves the difference. Try a larger budget, or a smaller batch."
            ) from error
        plan = replace(smaller, budget_bytes=plan.budget_bytes, lookahead=plan.lookahead)


def _count(model: nn.Module, batch: Any, profile: Profile, plan: Plan, loss: LossFunction | None) -> int:
    """Return the counted peak of a plan's training step."""
    taken = {"other_bytes": profile.other_bytes, "update_bytes": profile.update_bytes}
    counted = count_peak(model, batch, plan.schedule, loss, **taken, lookahead=plan.lookahead)
    if profile.workspace_bytes:
        counted += max(profile.workspace_bytes, _measure_workspace(model, batch, profile, plan, loss))
    return counted


def _measure_workspace(model: nn.Module, batch: Any, profile: Profile, plan: Plan, loss: LossFunction | None) -> int:
    """Return the workspace of a plan's own training step, as far as that can be run."""
    begin = profile.memory.fixed_bytes - profile.other_bytes - profile.workspace_bytes
    counted = count_peak(model, batch, plan.schedule, loss, lookahead=plan.lookahead) - begin
    try:
        return measure_workspace(model, batch, plan.schedule, counted, loss, plan.lookahead)
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
    remedy = "Try a smaller batch, autocast, or an optimizer of less state."
    if worst.phase == "backward":
        remedy += _TILES_HELP
    if min_peak == problem.update_peak:
        where, remedy = "at the optimizer's update", "Try foreach=False, or an optimizer of less state."
    return (
        f"No schedule fits {format_bytes(limit)}: at least {format_bytes(min_peak)} ({min_peak} bytes) are needed, {where}. Of "
        f"these {format_bytes(problem.fixed_bytes)} are weights, optimizer state and batch. {remedy}"
    )
