"""A plan for a run: the fastest schedule with which its training steps stay within the recipe's memory budget.

What is planned is the step that training makes: its batch (of texts, the longest there may be), its autocast, its loss. What is
alive beside it counts too: state of the optimizer, averaged weights, labels, the batch that is loaded ahead on a CPU, the
gradients of earlier batches where an update takes several, and the buckets in which several processes exchange them.

The main process makes the plan and all use it, so nothing here may wait for another process.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from revzoo.analysis.memory_report import state_bytes
from revzoo.data.random import seeded
from revzoo.errors import PlanError
from revzoo.file import write_atomically
from revzoo.format import format_bytes
from revzoo.planning.budget import budget_bytes
from revzoo.planning.count import counted_peak
from revzoo.planning.plan import Plan, checked, solve
from revzoo.planning.profile import held_bytes, profile
from revzoo.planning.setting import Setting, setting
from revzoo.training.setup import Run

_SCALAR_BYTES = 2 * 4  # the sum of an epoch's losses, and a loss beside its share of an update
# Of each channel: two statistics that BatchNorm's kernel keeps in float32, and its fake in half precision (`isolated`).
_MISSED_BYTES = 2 * 2


def put_to_work(run: Run) -> Plan | None:
    """Give the model of every process the run's plan and return it; None where the recipe has no budget.

    The folder's plan is taken where it has one, else one is made; weights, gradients, buffers and random streams stay as they
    were.

    Raises:
        BudgetError: nothing fits the budget.
        PlanError: the plan in the folder was made for something else.
        InputError: a budget that this device cannot be asked for.
        RecoveryError: a step does not repeat itself.
    """
    if run.recipe.memory.budget is None:
        return None
    plan = broadcast_object_list([_found(run) if run.accelerator.is_main_process else None])[0]
    if isinstance(plan, Exception):
        raise plan
    assert isinstance(plan, Plan)
    with run.accelerator.autocast():
        plan.apply(run.model)
    return plan


def keep(run: Run, plan: Plan | None) -> None:
    """Save the plan in the run's folder, from where a resumed run takes it."""
    if plan is not None and run.accelerator.is_main_process:
        write_atomically(run.folder.plan, plan.save)


def _found(run: Run) -> Plan | Exception:
    """Return the plan, or why there is none, for all processes: the others wait for either."""
    try:
        return _read(run) if run.folder.plan.exists() else _made(run)
    except Exception as error:
        return error


def _made(run: Run) -> Plan:
    options, device, step = run.recipe.memory, run.accelerator.device, _Step(run)
    assert options.budget is not None
    limit = budget_bytes(options.budget, device, step.present_bytes)
    with step.counted():
        found = profile(run.model, step.batch, run.optimizer, loss=step.loss, other_bytes=step.other_bytes)
        found = replace(found, setting=step.setting)
        plan = checked(run.model, step.batch, found, solve(found, limit, options.solver), step.loss)
    if device.type == "cuda":  # what profiling has taken is not what training takes
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    return plan


def _read(run: Run) -> Plan:
    """Return the plan in the folder.

    Raises:
        PlanError: it is damaged, or not for this run as it is now.
    """
    way = f"Put back what was changed, or delete {run.folder.plan} to have it planned again, or start a new run."
    try:
        plan = Plan.load(run.folder.plan)
    except PlanError as error:
        raise PlanError(f"{error} {way}") from error
    reasons = list(plan.setting.differences(_Step(run).setting)) or list(_changes(run, plan))
    if reasons:
        raise PlanError(f"{run.folder.plan} is for {'; '.join(reasons)}. {way}")
    return plan


def _changes(run: Run, plan: Plan) -> Iterator[str]:
    """Yield, in words, what the recipe asks for otherwise than the plan was made for."""
    options, step = run.recipe.memory, _Step(run)
    assert options.budget is not None
    limit = plan.budget_bytes if options.budget == "auto" else budget_bytes(options.budget, run.accelerator.device)
    if limit != plan.budget_bytes:
        yield f"a budget of {format_bytes(plan.budget_bytes)} and not {format_bytes(limit)}"
    if options.solver != plan.solver:
        yield f"the solver {plan.solver!r} and not {options.solver!r}"
    if plan.units != run.model.units:
        yield "other units than the model has"
        return
    with step.counted():
        state = state_bytes(run.model, run.optimizer)
        peak = counted_peak(run.model, step.batch, plan.schedule, step.loss, step.other_bytes + state)
    if peak > max(plan.peak_bytes, plan.budget_bytes):
        yield f"steps of {format_bytes(plan.peak_bytes)} and not {format_bytes(peak)}, which is above the budget"


class _Step:
    """What a training step of the run is made of.

    Args:
        run: all that it is about.
    """

    def __init__(self, run: Run):
        self._model, self._loss = run.model, run.loss
        recipe, device = run.recipe, run.accelerator.device
        with seeded(recipe.train.seed):
            self.batch = run.model.example_input(recipe.data.batch_size, "cpu")
            # A language model's labels are as many as its ids, here in the one row that the loss makes of them.
            labels = torch.zeros(self.batch.numel() if run.data.classes is None else len(self.batch), dtype=torch.int64)
            targets = run.mix(self.batch.clone(), labels)[1]
        self.batch, self._targets = self.batch.to(device), targets.to(device)
        gradients = sum(p.nbytes for p in run.model.parameters() if p.requires_grad)
        self._adds_up = recipe.train.accumulate > 1
        averaged = 0 if run.ema is None else held_bytes(run.ema.module)
        buckets = gradients if run.accelerator.num_processes > 1 else 0
        ahead = self.batch.nbytes + labels.nbytes if device.type == "cpu" else 0
        soft = 0 if targets is labels else targets.nbytes
        norms = [m for m in run.model.modules() if isinstance(m, _BatchNorm) and recipe.train.mixed_precision != "no"]
        missed = sum(norm.num_features for norm in norms) * _MISSED_BYTES
        self.other_bytes = averaged + buckets + ahead + labels.nbytes + soft + missed + _SCALAR_BYTES
        state = state_bytes(run.model, run.optimizer) if run.optimizer.state else 0
        self.present_bytes = held_bytes(run.model) + averaged + buckets + state  # on the device already
        with run.accelerator.autocast():
            self.setting: Setting = setting(run.model, self.batch)

    def loss(self, outputs: Any) -> Tensor:
        """Return the run's loss of what the model returns."""
        loss: Tensor = self._loss(outputs, self._targets)
        return loss

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Have every step that is looked at begin with the gradients that training has at its beginning."""
        handle = self._model.register_forward_pre_hook(self._begin)
        try:
            yield
        finally:
            handle.remove()

    def _begin(self, model: nn.Module, inputs: Any) -> None:
        for p in model.parameters() if self._adds_up else ():
            if p.requires_grad:
                p.grad = torch.zeros_like(p)
