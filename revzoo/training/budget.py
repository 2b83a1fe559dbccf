"""Plan a run: find the fastest schedule with which training stays within the recipe's memory budget.

The planned step is the one that training makes: its batch (for texts, of the greatest length), its autocast, its loss. Whatever
is alive besides the step counts too: the optimizer's state and what its update takes, averaged weights, labels, on a CPU the
next batch, which is loaded ahead, with gradient accumulation the gradients of earlier batches, and the buckets in which
processes exchange gradients. With an optimizer inside backward each gradient counts as long as it is there.

The main process makes the plan for all of them. The others wait for it, so nothing here may wait for another process.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from revzoo.analysis.dry_run import accumulated_gradients, updates_in_backward
from revzoo.analysis.optimizer_step import count_optimizer, count_updates_apart
from revzoo.data.random import seeded
from revzoo.errors import PlanError
from revzoo.file import write_atomically
from revzoo.format import format_bytes
from revzoo.planning.budget import parse_budget
from revzoo.planning.plan import Plan
from revzoo.planning.planner import profile_and_plan
from revzoo.planning.profiling.count import count_peak
from revzoo.planning.profiling.profile import count_model_bytes
from revzoo.planning.setting import Setting, read_setting
from revzoo.training.main_process import call_on_main
from revzoo.training.setup import Run

_SCALAR_BYTES = 8 + 4  # the sum of an epoch's losses; a batch's loss beside the same divided by the batches of an update


def apply_plan(run: Run, *, anew: bool = False) -> Plan | None:
    """Give the model of every process the schedule of the run's plan and return the plan; None if there is no budget.

    Look-ahead is the plan's too; without a budget it is the recipe's.

    The plan is read from the run's folder if it has one, else made. Weights, gradients, buffers and the states of the random
    generators are left unchanged.

    Args:
        run: the run.
        anew: make a plan even if the folder has one, which was made for what the user has changed since.

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
        has_plan = not anew and run.folder.plan.exists()
        plan = call_on_main(run.accelerator, lambda: _read_plan(run) if has_plan else _make_plan(run))
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
    """Give the models the coupling of the first update inside the block, for which every plan is made.

    With a budget only kept bits can move, and only downwards, so that no later update takes more memory.
    """
    run.set_coupling(0)
    try:
        yield
    finally:
        run.set_coupling(run.progress.updates)


def _make_plan(run: Run) -> Plan:
    options, device, step = run.recipe.memory, run.accelerator.device, _Step(run)
    assert options.budget is not None
    limit = parse_budget(options.budget, device, step.present_bytes)
    with step.treat_gradients():
        _, plan = profile_and_plan(
            run.model,
            step.batch,
            limit,
            solver=options.solver,
            optimizer=step.optimizer,
            loss=step.loss,
            lookahead=options.lookahead,
            other_bytes=step.other_bytes,
            setting=step.setting,
        )
    if device.type == "cuda":  # the peak of profiling is not the peak of training
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    return plan


def _read_plan(run: Run) -> Plan:
    """Return the plan in the folder.

    Raises:
        PlanError: it is damaged, or was made for another model, batch, device or budget.
    """
    remedy = f"Put back what was changed, or delete {run.folder.plan} to have it planned again, or start a new run."
    try:
        plan = Plan.load(run.folder.plan)
    except PlanError as error:
        raise PlanError(f"{error} {remedy}") from error
    reasons = list(plan.setting.differences(_Step(run).setting)) or list(_list_changes(run, plan))
    if reasons:
        raise PlanError(f"{run.folder.plan} was made for other circumstances ({'; '.join(reasons)}). {remedy}")
    return plan


def _list_changes(run: Run, plan: Plan) -> Iterator[str]:
    """Yield, in words, each difference between what the plan was made for and what the recipe asks for now."""
    options, step = run.recipe.memory, _Step(run)
    assert options.budget is not None
    limit = plan.budget_bytes if options.budget == "auto" else parse_budget(options.budget, run.accelerator.device)
    if limit != plan.budget_bytes:
        yield f"budget: {format_bytes(plan.budget_bytes)} in the plan, {format_bytes(limit)} now"
    if options.solver != plan.solver:
        yield f"solver: {plan.solver} in the plan, {options.solver} now"
    if options.lookahead not in ("auto", plan.lookahead):
        yield f"lookahead: {plan.lookahead} in the plan, {options.lookahead} now"
    if plan.units != run.model.units:
        yield "its units are not the model's"
        return
    with step.treat_gradients():
        taken = count_optimizer(run.model, step.optimizer)
        peak = count_peak(
            run.model,
            step.batch,
            plan.schedule,
            step.loss,
            step.other_bytes + taken.state,
            update_bytes=taken.update,
            lookahead=plan.lookahead,
        )
    if peak > max(plan.peak_bytes, plan.budget_bytes):
        yield f"peak: {format_bytes(plan.peak_bytes)} in the plan, {format_bytes(peak)} now, which is above the budget"


class _Step:
    """The training step of a run: batch, loss, and the bytes that are alive besides what the step itself allocates.

    Args:
        run: the run.
    """

    def __init__(self, run: Run):
        self._model, self._loss = run.model, run.loss
        recipe, device = run.recipe, run.accelerator.device
        with seeded(recipe.train.seed):
            self.batch = run.model.example_input(run.batch_size, "cpu")
            # A language model has one label for each id; the loss flattens them as they are here.
            labels = torch.zeros(self.batch.numel() if run.data.num_classes is None else len(self.batch), dtype=torch.int64)
            targets = run.mix(self.batch.clone(), labels, recipe.train.seed)[1]
        self.batch, self._targets = self.batch.to(device), targets.to(device)
        gradients = sum(p.nbytes for p in run.model.parameters() if p.requires_grad)
        self._accumulates = recipe.train.accumulate > 1
        averaged = 0 if run.ema is None else count_model_bytes(run.ema.module)
        buckets = gradients if run.accelerator.num_processes > 1 else 0
        ahead = self.batch.nbytes + labels.nbytes if device.type == "cpu" else 0
        soft = 0 if targets is labels else targets.nbytes
        state = count_optimizer(run.model, run.optimizer).state
        # One that updates inside backward makes no update after it: what it takes is counted by `treat_gradients`.
        in_backward = recipe.train.optimizer_in_backward
        self.optimizer = None if in_backward else run.optimizer
        self._updates = count_updates_apart(run.model, run.optimizer) if in_backward else None
        besides = averaged + buckets + (state if in_backward else 0)
        self.other_bytes = besides + ahead + labels.nbytes + soft + _SCALAR_BYTES
        is_present = averaged + buckets + (state if run.optimizer.state else 0)
        self.present_bytes = count_model_bytes(run.model) + is_present  # on the device already
        with run.accelerator.autocast():
            self.setting: Setting = read_setting(run.model, self.batch)

    def loss(self, outputs: Any) -> Tensor:
        """Return the run's loss for the model's outputs."""
        loss: Tensor = self._loss(outputs, self._targets)
        return loss

    def treat_gradients(self) -> AbstractContextManager[None]:
        """Let every step inside the block begin and end with the gradients that there are in training."""
        if self._updates is not None:
            return updates_in_backward(self._model, self._updates)
        return accumulated_gradients(self._model) if self._accumulates else nullcontext()
