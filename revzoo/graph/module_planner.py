"""From any module and a budget to a plan: capture its graph, record a step, choose spans, and count the planned step."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException

from revzoo.analysis.chains import preserve_schedules
from revzoo.analysis.optimizer_step import OptimizerBytes, count_optimizer
from revzoo.errors import BudgetError, join_names
from revzoo.format import format_bytes
from revzoo.graph.call_times import CallTimes, assign_times, measure_graphs
from revzoo.graph.capture import Capture, capture
from revzoo.graph.chain_schedules import Schedules, list_schedules, set_schedules
from revzoo.graph.front import Front, find_front
from revzoo.graph.graph_plan import GraphPlan
from revzoo.graph.module_plan import ModulePlan
from revzoo.graph.plan_details import PlanDetails, describe_step, list_reruns
from revzoo.graph.published import choose_as_published
from revzoo.graph.spans import Spans
from revzoo.graph.step_record import Loss, Record, count_step, record
from revzoo.planning.budget import parse_budget
from revzoo.planning.profiling.profile import count_model_bytes
from revzoo.planning.setting import Setting, read_setting

ModuleSolver = Literal["timeline", "reforwarding"]
T = TypeVar("T")


def plan_module(
    module: nn.Module,
    batch: Any,
    budget: str | int | None,
    *,
    solver: ModuleSolver = "timeline",
    optimizer: torch.optim.Optimizer | None = None,
    loss: Callable[[Any], Tensor] | None = None,
    profile: bool = False,
) -> ModulePlan:
    """Return the plan with the least work whose counted peak is within the budget.

    Args:
        module: any, in the state in which it will be trained.
        batch: a tensor, a tuple or list of positional arguments, or a mapping of keyword arguments.
        budget: limit for the peak of all memory together, as for `revzoo.solve`; None is the smallest peak that is reached
            with at most one more forward.
        solver: "timeline" looks for the least work within the budget. "reforwarding" is the published plan, for comparison: it
            takes what it takes, and the budget can only refuse it.
        optimizer: its state is part of every peak, and its update may be the peak.
        loss: computes the loss from what the module returns; None is a sum, which keeps nothing for backward.
        profile: run the module's calls a few times on its device, and choose by their times instead of FLOPs and moved bytes;
            schedules of reversible chains in it are compared by FLOPs.
    Raises:
        InputError: a module, batch, optimizer or budget that cannot be used.
        BudgetError: no plan fits; names the smallest budget that would.
        MemoryError: with `profile`, not even the forward fits.
    """
    plan, _ = _plan(module, batch, budget, solver, optimizer, loss, profile, lambda step, plan: None)
    return plan


def plan_in_detail(
    module: nn.Module,
    batch: Any,
    budget: str | int,
    *,
    solver: ModuleSolver = "timeline",
    optimizer: torch.optim.Optimizer | None = None,
    loss: Callable[[Any], Tensor] | None = None,
    profile: bool = False,
) -> tuple[ModulePlan, PlanDetails]:
    """Return a plan, and what its step does call by call. Arguments and errors are those of `plan_module`."""
    return _plan(module, batch, budget, solver, optimizer, loss, profile, lambda step, plan: step.describe(plan))


def _plan(
    module: nn.Module,
    batch: Any,
    budget: str | int | None,
    solver: ModuleSolver,
    optimizer: torch.optim.Optimizer | None,
    loss: Loss | None,
    profile: bool,
    describe: "Callable[[_Step, ModulePlan], T]",
) -> "tuple[ModulePlan, T]":
    """Return a plan with what `describe` says of it."""
    setting, taken = read_setting(module, batch), count_optimizer(module, optimizer)
    if budget is not None:
        device = next(module.parameters()).device
        budget = parse_budget(budget, device, count_model_bytes(module))  # a wrong one is refused before anything is captured
    base: Record | None = None
    plans: list[tuple[ModulePlan, T]] = []
    refusals: list[tuple[int, BudgetError]] = []
    with preserve_schedules(module):
        for schedules in list_schedules(module):
            set_schedules(module, schedules)
            measured = measure_graphs(module, batch) if profile else None
            with _record(module, batch, taken, loss, setting, schedules, base) as step:
                base = step.base
                step.times = None if measured is None else assign_times(measured, step.captured.calls)
                try:
                    plans += [(plan, describe(step, plan)) for plan in step.plan(budget, solver)]
                except BudgetError as error:
                    refusals.append((step.least_peak, error))
            if solver == "reforwarding":
                break
    if not plans:
        raise min(refusals, key=lambda each: each[0])[1]
    best, details = min(plans, key=lambda each: each[0].peak_bytes if budget is None else each[0].extra_flops)
    least = min([*(each.min_peak_bytes for each, _ in plans), *(least for least, _ in refusals)])
    return replace(best, min_peak_bytes=least), details


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
        optimizer: its state is part of every peak, and its update may be the peak.
        loss: as for `revzoo.plan`.
    Raises:
        InputError: a module, batch, optimizer or budget that cannot be used.
        BudgetError: no plan fits; names the smallest budget that would.
    """
    plan_module(module, batch, budget, optimizer=optimizer, loss=loss).apply(module, batch)
    return module


@contextmanager
def _record(module: nn.Module, batch: Any, *arguments: Any) -> "Iterator[_Step]":
    """Yield a recorded step; with values where backward, a hook or the loss reads them."""
    with ExitStack() as stack:
        try:
            step = _Step(stack.enter_context(capture(module, batch)), *arguments)
        except DataDependentOutputException:
            stack.close()
            step = _Step(stack.enter_context(capture(module, batch, with_values=True)), *arguments)
        yield step


class _Step:
    """A training step of a captured module with some schedules of its chains, recorded, with the front of its plans.

    Args:
        captured: the module.
        optimizer: what the optimizer takes.
        loss: as for `plan_module`.
        setting: what plans hold for.
        schedules: of the chains in the module.
        base: of the step that stores everything, its chains too; None is this one.
    """

    def __init__(
        self,
        captured: Capture,
        optimizer: OptimizerBytes,
        loss: Loss | None,
        setting: Setting,
        schedules: Schedules,
        base: Record | None,
    ):
        self.captured, self._optimizer, self._loss = captured, optimizer, loss
        self._setting, self._schedules = setting, schedules
        self.record = record(captured, loss)
        self.base = base or self.record
        self.times: CallTimes | None = None

    def plan(self, budget: int | None, solver: ModuleSolver) -> list[ModulePlan]:
        """Return the plan for a budget; none if without one nothing takes at most one more forward.

        Raises:
            BudgetError: no plan fits.
        """
        stored_peak = self._add_optimizer(self.record.peak_bytes)
        if solver == "reforwarding":
            return [self._plan_as_published(budget)]
        if budget is None:
            most_flops = sum(self.base.flops) - (self.record.total_flops - self.base.total_flops)
            if most_flops < 0:
                return []
            spans = self.front.make_spans(self.front.choose_least(most_flops))
            peak, flops = self._count(spans)
            return [self._make_plan(spans, peak, flops, peak)]
        if stored_peak <= budget:
            notes = [f"Everything is stored: the budget is above the {format_bytes(stored_peak)} that this takes."]
            return [self._make_plan(None, stored_peak, self.record.total_flops, budget, notes if self._is_base else [])]
        return [self._make_plan(*self._fit(budget), budget)]

    def _plan_as_published(self, budget: int | None) -> ModulePlan:
        spans, chosen = choose_as_published(self.record)
        peak, flops = self._count(spans)
        if budget is not None and peak > budget:
            raise BudgetError(
                f"Re-forwarding as published knows no budget, and its plan takes {format_bytes(peak)}, more than "
                f"{format_bytes(budget)}. Try solver='timeline', or a larger budget."
            )
        note = f"Re-forwarding as published, which counts {format_bytes(chosen.cost)} of activations (equation 1)."
        return self._make_plan(spans, peak, flops, peak if budget is None else budget, [note])

    @property
    def _is_base(self) -> bool:
        return self.base is self.record

    @cached_property
    def front(self) -> Front:
        return find_front(self.record, nanoseconds=None if self.times is None else self.times.forward)

    @property
    def least_peak(self) -> int:
        return self._add_optimizer(self.front.list_points()[0][0])

    def _add_optimizer(self, peak: int) -> int:
        """Return the peak of the step with the optimizer, given that of forward and backward."""
        left = self.record.fixed_bytes + self.record.gradient_bytes[-1]
        return max(peak, left + self._optimizer.update) + self._optimizer.state

    def _count(self, spans: Spans) -> tuple[int, int]:
        """Return the counted peak and the FLOPs of the step with these spans."""
        peak, flops = count_step(self.captured, spans, self._loss)
        return self._add_optimizer(peak), flops

    def _fit(self, budget: int) -> tuple[Spans, int, int]:
        """Return the spans with the least work whose counted peak is within the budget, that peak, and all FLOPs.

        A count may be above what was predicted, so the smallest plan is counted, too, before a budget is refused.
        """
        predicted = [peak for peak, _ in self.front.list_points()]
        above = list[int]()  # counted peaks
        room = budget - self._optimizer.state if self._add_optimizer(0) <= budget else 0
        number = bisect_right(predicted, room) or 1
        while number:
            spans = self.front.make_spans(self.front.choose(predicted[number - 1]) or ())
            peak, flops = self._count(spans)
            if peak <= budget:
                return spans, peak, flops
            above.append(peak)
            room = predicted[number - 1] - (peak - budget)
            number = 0 if number == 1 else bisect_right(predicted, room) or 1
        fixed = format_bytes(self.record.fixed_bytes + self._optimizer.state)
        least = min(above)
        where, remedy = self.front.name_bottleneck(), "Try a smaller batch, autocast, or an optimizer of less state."
        if least == self._add_optimizer(0):
            where, remedy = "at the optimizer's update", "Try foreach=False, or an optimizer of less state."
        raise BudgetError(
            f"No plan fits {format_bytes(budget)}: at least {format_bytes(least)} ({least} bytes) are needed, "
            f"{where}. Of these {fixed} are weights, optimizer state and batch. {remedy} {self._describe_graphs()}".rstrip()
        )

    def _make_plan(self, spans: Spans | None, peak: int, flops: int, budget: int, notes: Sequence[str] = ()) -> ModulePlan:
        everything = Spans(self.record.atoms, (), frozenset(), frozenset())
        graphs = self._describe_graphs()
        return ModulePlan(
            graphs=tuple(GraphPlan.of(each.digest, (spans or everything).take(each.numbers)) for each in self.captured.calls),
            schedules=tuple((path, tuple(modes)) for path, modes in self._schedules.items()),
            peak_bytes=peak,
            budget_bytes=budget,
            extra_flops=flops - self.base.total_flops,
            total_flops=self.base.total_flops,
            min_peak_bytes=min(self.least_peak, peak),
            no_recompute_peak_bytes=self._add_optimizer(self.base.peak_bytes),
            setting=self._setting,
            notes=(
                *notes,
                *self.captured.notes,
                *self._describe_chains(),
                *([graphs] if graphs else []),
                *self._describe_lost_work(),
            ),
            seconds=self._predict_seconds(spans),
            stored_seconds=self._predict_seconds(None),
            spread=None if self.times is None or not self._is_base else self.times.spread,
        )

    def _predict_seconds(self, spans: Spans | None) -> float | None:
        """Return the time of a step with these spans; None where nothing was timed, or chains take more between the graphs."""
        if self.times is None or not self._is_base:
            return None
        reruns = [] if spans is None else list_reruns(self.captured, spans, self._loss)
        return self.times.seconds + sum(self.times.forward[i] for i in reruns) / 1e9

    def describe(self, plan: ModulePlan) -> PlanDetails:
        """Return what the step of a plan does, call by call."""
        spans = [
            graph.bind(each.graph) if graph.ends else Spans.keep_all(each.atoms)
            for graph, each in zip(plan.graphs, self.captured.calls, strict=True)
        ]
        details = describe_step(self.captured, self.record, spans, self._loss, self.front, self._optimizer.state, self.times)
        more = self.record.total_flops - self.base.total_flops
        return replace(details, front=tuple(replace(each, extra_flops=each.extra_flops + more) for each in details.front))

    def _describe_chains(self) -> Iterator[str]:
        for path, modes in self._schedules.items():
            if counts := Counter(mode for mode in modes if mode.drops):
                parts = join_names([f"{count} {mode}" for mode, count in counts.items()])
                yield f"Of the {len(modes)} units of {path}, {parts}."

    def _describe_lost_work(self) -> list[str]:
        if not self.front.lost_work:
            return []
        whole, what = (self.record.total_flops, "FLOPs") if self.times is None else (round(self.times.seconds * 1e9), "time")
        percent = 100 * self.front.lost_work / max(1, whole)
        return [
            f"Plans were too many to compare them all: one of those left out may take less work, by at most {percent:.2g} % of "
            f"the training step's {what}."
        ]

    def _describe_graphs(self) -> str:
        count = len(self.captured.calls)
        if not count:
            return f"torch.compile captures nothing of {self._setting.model}, so everything is stored."
        if count == 1:
            return ""
        kept = sum(s.bytes for s in self.record.storages if s.released >= 0 and not self.record.atoms[s.born].nodes)
        return (
            f"For torch.compile the forward is {count} graphs. What runs between them keeps {format_bytes(kept)}, whatever the "
            "plan. torch._dynamo.explain(module)(batch) says where they end."
        )
