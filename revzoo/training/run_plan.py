"""Plan a run: find the fastest schedule with which training stays within the recipe's memory budget.

The main process makes the plan for all of them. The others wait for it, so it must not wait for another process. What "auto" or
a share of the memory is in bytes may differ between them: the smallest budget counts.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from accelerate.utils import gather_object

from revzoo.device import forget_peak
from revzoo.errors import PlanError
from revzoo.file import write_atomically
from revzoo.format import format_bytes
from revzoo.planning.budget import parse_budget
from revzoo.planning.plan import Plan
from revzoo.training.planned_step import PlannedStep
from revzoo.training.processes import call_on_all, call_on_main
from revzoo.training.run import Run


def apply_plan(run: Run, *, anew: bool = False) -> Plan | None:
    """Give the model of every process the schedule of the run's plan and return the plan; None if there is no budget.

    Look-ahead is the plan's too; without a budget it is the recipe's.

    The plan is read from the run's folder if it has one, else made. Weights, gradients, buffers and the states of the random
    generators are left unchanged.

    Args:
        run: the run.
        anew: make a plan even if the folder has one, since the user has changed what that plan was for.

    Raises:
        BudgetError: no schedule fits the budget.
        PlanError: the plan in the folder was made for something else.
        InputError: the budget cannot be determined on this device.
        RecoveryError: a step does not give the same result twice.
    """
    if run.recipe.memory.budget is None:
        run.model.lookahead = run.recipe.memory.lookahead
        return None
    with _first_coupling(run):
        step = call_on_all(lambda: PlannedStep(run))
        limit = min(gather_object([call_on_all(lambda: _find_limit(run, step))]))
        has_plan = not anew and run.folder.plan.exists()
        plan = call_on_main(run.accelerator, lambda: _read_plan(run, step, limit) if has_plan else _make_plan(run, step, limit))
        with run.accelerator.autocast():
            plan.apply(run.model)
    return plan


def save_plan(run: Run, plan: Plan | None) -> None:
    """Save the plan in the run's folder, where a resumed run looks for it."""
    if plan is not None:
        save = plan.save
        call_on_main(run.accelerator, lambda: write_atomically(run.folder.plan, save))


@contextmanager
def _first_coupling(run: Run) -> Iterator[None]:
    """Give the models the coupling of the first update inside the block: every plan is made for it.

    With a budget only kept bits can move, and only downwards, so that no later update takes more memory.
    """
    run.set_coupling(0)
    try:
        yield
    finally:
        run.set_coupling(run.progress.updates)


def _find_limit(run: Run, step: PlannedStep) -> int:
    """Return the budget on this process's device [bytes]."""
    budget = run.recipe.memory.budget
    assert budget is not None
    return parse_budget(budget, run.accelerator.device, step.present_bytes, sharing=count_sharing(run))


def count_sharing(run: Run) -> int:
    """Return how many processes share the memory of this one's device. Without GPUs those of a machine do."""
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", run.accelerator.num_processes))
    return processes if run.accelerator.device.type == "cpu" else 1


def _make_plan(run: Run, step: PlannedStep, limit: int) -> Plan:
    plan = step.plan(limit)
    forget_peak(run.accelerator.device)  # the peak of profiling is not the peak of training
    return plan


def _read_plan(run: Run, step: PlannedStep, limit: int) -> Plan:
    """Return the plan in the folder. Changes of the recipe are known by now: `needs_new_plan`.

    Raises:
        PlanError: it is damaged, or was made for another model, batch, device or budget.
    """
    remedy = f"Put back what was changed, or delete {run.folder.plan} to have it planned again, or start a new run."
    try:
        plan = Plan.load(run.folder.plan)
    except PlanError as error:
        raise PlanError(f"{error} {remedy}") from error
    reasons = list(plan.setting.differences(replace(step.setting, tiles=plan.setting.tiles)))
    if run.recipe.memory.budget != "auto" and limit != plan.budget_bytes:  # a share of another machine's memory
        reasons.append(f"budget: {format_bytes(plan.budget_bytes)} in the plan, {format_bytes(limit)} now")
    if not reasons and (peak := step.count_peak(plan)) > max(plan.peak_bytes, plan.budget_bytes):
        reasons.append(
            f"peak: {format_bytes(plan.peak_bytes)} in the plan, {format_bytes(peak)} now, which is above the budget"
        )
    if reasons:
        raise PlanError(f"{run.folder.plan} was made for other circumstances ({'; '.join(reasons)}). {remedy}")
    return plan
