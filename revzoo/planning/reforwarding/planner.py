"""From any module and a budget to a plan: capture its graph, record a step, choose spans, and count the planned step."""

from collections.abc import Callable
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn

from revzoo.analysis.memory_report import count_optimizer_bytes
from revzoo.errors import BudgetError
from revzoo.format import format_bytes
from revzoo.planning.budget import parse_budget
from revzoo.planning.profiling.profile import count_model_bytes
from revzoo.planning.reforwarding.capture import Capture, capture
from revzoo.planning.reforwarding.graph_plan import GraphPlan
from revzoo.planning.reforwarding.module_plan import ModulePlan
from revzoo.planning.reforwarding.nesting import add_nests
from revzoo.planning.reforwarding.published import choose_as_published
from revzoo.planning.reforwarding.record import Loss, count_step, record
from revzoo.planning.reforwarding.search import Choices, Front
from revzoo.planning.setting import Setting, read_setting
from revzoo.runtime.graph.spans import Spans

ModuleSolver = Literal["timeline", "reforwarding"]


def plan_module(
    module: nn.Module,
    batch: Any,
    budget: str | int | None,
    *,
    solver: ModuleSolver = "timeline",
    optimizer: torch.optim.Optimizer | None = None,
    loss: Callable[[Any], Tensor] | None = None,
) -> ModulePlan:
    """Return the plan with the least work whose counted peak is within the budget. Nothing is computed or allocated.

    Args:
        module: any, in the state in which it will be trained.
        batch: a tensor, a tuple or list of positional arguments, or a mapping of keyword arguments.
        budget: limit for the peak of all memory together, as for `revzoo.solve`; None is the smallest peak that is reached
            with at most one more forward.
        solver: "timeline" looks for the least work within the budget. "reforwarding" is the published plan, for comparison: it
            takes what it takes, and the budget can only refuse it.
        optimizer: its state is part of every peak.
        loss: computes the loss from what the module returns; None is a sum, which keeps nothing for backward.
    Raises:
        InputError: a module, batch, optimizer or budget that cannot be used.
        BudgetError: no plan fits; names the smallest budget that would.
    """
    setting, optimizer_bytes = read_setting(module, batch), count_optimizer_bytes(module, optimizer)
    if budget is not None:
        device = next(module.parameters()).device
        budget = parse_budget(budget, device, count_model_bytes(module))  # a wrong one is refused before anything is captured
    with capture(module, batch) as captured:
        step = _Step(captured, optimizer_bytes, loss, setting)
        if solver == "reforwarding":
            return _plan_as_published(step, budget)
        if budget is not None and step.stored_peak <= budget:
            note = f"Everything is stored: the budget is above the {format_bytes(step.stored_peak)} that this takes."
            return step.make_plan(None, step.stored_peak, step.record.total_flops, budget, (note,))
        if budget is None:
            spans = step.front.make_spans(step.front.choose_least(sum(step.record.flops)))
            peak, flops = step.count(spans)
            return step.make_plan(spans, peak, flops, peak)
        return step.make_plan(*step.fit(budget), budget)


def reforward(
    module: nn.Module,
    batch: Any,
    budget: str | int | None = None,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    loss: Callable[[Any], Tensor] | None = None,
) -> nn.Module:
    """Plan a module and apply the plan; return the module.

    Example:
        model = timm.create_model("resnet50")
        revzoo.reforward(model, images)  # trains as before, in a fraction of the memory

    Args:
        module: any, in the state in which it will be trained.
        batch: as for `revzoo.plan`.
        budget: as for `revzoo.plan`; None is the smallest peak that is reached with at most one more forward.
        optimizer: its state is part of every peak.
        loss: as for `revzoo.plan`.
    Raises:
        InputError: a module, batch, optimizer or budget that cannot be used.
        BudgetError: no plan fits; names the smallest budget that would.
    """
    plan_module(module, batch, budget, optimizer=optimizer, loss=loss).apply(module, batch)
    return module


def _plan_as_published(step: "_Step", budget: int | None) -> ModulePlan:
    spans, chosen = choose_as_published(step.record)
    peak, flops = step.count(spans)
    if budget is not None and peak > budget:
        raise BudgetError(
            f"Re-forwarding as published knows no budget, and its plan takes {format_bytes(peak)}, more than "
            f"{format_bytes(budget)}. Try solver='timeline', or a larger budget."
        )
    note = f"Re-forwarding as published, which counts {format_bytes(chosen.cost)} of activations (equation 1)."
    return step.make_plan(spans, peak, flops, peak if budget is None else budget, (note,))


class _Step:
    """A training step of a captured module, recorded, with the front of its plans."""

    def __init__(self, captured: Capture, optimizer_bytes: int, loss: Loss | None, setting: Setting):
        self._captured, self._optimizer_bytes, self._loss, self._setting = captured, optimizer_bytes, loss, setting
        self.record = record(captured, loss)
        self.stored_peak = self.record.peak_bytes + optimizer_bytes

    @cached_property
    def front(self) -> Front:
        choices = Choices(self.record)
        add_nests(choices)
        return Front(choices)

    @property
    def least_peak(self) -> int:
        return self.front.list_points()[0][0] + self._optimizer_bytes

    def count(self, spans: Spans) -> tuple[int, int]:
        """Return the counted peak and the FLOPs of the step with these spans."""
        peak, flops = count_step(self._captured, spans, self._loss)
        return peak + self._optimizer_bytes, flops

    def fit(self, budget: int) -> tuple[Spans, int, int]:
        """Return the spans with the least work whose counted peak is within the budget, that peak, and all FLOPs."""
        room = budget
        while (chosen := self.front.choose(room - self._optimizer_bytes)) is not None:
            spans = self.front.make_spans(chosen)
            peak, flops = self.count(spans)
            if peak <= budget:
                return spans, peak, flops
            room -= peak - budget
        fixed = format_bytes(self.record.fixed_bytes + self._optimizer_bytes)
        raise BudgetError(
            f"No plan fits {format_bytes(budget)}: at least {format_bytes(self.least_peak)} ({self.least_peak} bytes) are "
            f"needed. Of these {fixed} are weights, optimizer state and batch. Try a smaller batch, autocast, or an optimizer "
            f"of less state. {self._describe_graphs()}".rstrip()
        )

    def make_plan(self, spans: Spans | None, peak: int, flops: int, budget: int, notes: tuple[str, ...] = ()) -> ModulePlan:
        """Return the plan that these spans are; None stores everything."""
        everything = Spans(self.record.atoms, (), frozenset(), frozenset())
        graphs = self._describe_graphs()
        return ModulePlan(
            graphs=tuple(GraphPlan.of(each.digest, (spans or everything).take(each.numbers)) for each in self._captured.calls),
            peak_bytes=peak,
            budget_bytes=budget,
            extra_flops=flops - self.record.total_flops,
            total_flops=self.record.total_flops,
            min_peak_bytes=min(self.least_peak, peak),
            no_recompute_peak_bytes=self.stored_peak,
            setting=self._setting,
            notes=(*notes, *self._captured.notes, *([graphs] if graphs else [])),
        )

    def _describe_graphs(self) -> str:
        count = len(self._captured.calls)
        if not count:
            return f"torch.compile captures nothing of {self._setting.model}, so everything is stored."
        if count == 1:
            return ""
        kept = sum(s.bytes for s in self.record.storages if s.released >= 0 and not self.record.atoms[s.born].nodes)
        return (
            f"For torch.compile the forward is {count} graphs. What runs between them is stored, {format_bytes(kept)}. "
            "torch._dynamo.explain(module)(batch) says where they end."
        )
