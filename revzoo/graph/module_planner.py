"""From any module and a budget to a plan: capture its graph, record a step, choose spans, and count the planned step."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from revzoo.analysis.chains import Chain, find_chains, preserve_schedules
from revzoo.analysis.dry_run import LossFunction
from revzoo.analysis.fake_tensors import FakeKernelError
from revzoo.analysis.optimizer_step import OptimizerBytes, count_optimizer
from revzoo.errors import BudgetError, InputError, join_names
from revzoo.format import format_bytes
from revzoo.graph.call_times import CallTimes, assign_times, measure_graphs
from revzoo.graph.capture import Capture, capture
from revzoo.graph.compiled_peak import find_obstacle, fit_compiled
from revzoo.graph.counted_step import FrontPoint, PlanDetails, SpannedStep, count_own_peak, count_step, describe_step
from revzoo.graph.front import Front, find_front
from revzoo.graph.graph_plan import GraphPlan
from revzoo.graph.module_plan import ModulePlan, set_schedules
from revzoo.graph.progress import Report, keep_silent
from revzoo.graph.refusal import describe_backward_hooks, describe_modes, unwrap
from revzoo.graph.spans import Spans
from revzoo.graph.step_record import Record, record
from revzoo.planning.budget import count_model_bytes, parse_budget
from revzoo.planning.setting import Setting, read_setting
from revzoo.runtime.attributes import preserve_generators
from revzoo.runtime.compiling import is_compiled
from revzoo.runtime.mode import Mode

Schedules = Mapping[str, list[Mode]]
_POINTS = 32  # of a front that is shown: enough for a smooth curve
_FEW = 8  # of the smallest plans, counted if more is counted than was predicted


def plan_module(
    module: nn.Module,
    batch: Any,
    budget: str | int | None,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    loss: LossFunction | None = None,
    profile: bool = False,
    compiled: bool | None = None,
    report: Report = keep_silent,
) -> tuple[ModulePlan, PlanDetails]:
    """Return the plan with the least work whose counted peak is within the budget, and what its step does call by call.

    Args:
        module: any, set up as it will be trained.
        batch: a tensor, a tuple or list of positional arguments, or a mapping of keyword arguments.
        budget: limit for the peak of all memory together, as for `revzoo.solve`; None is the smallest peak that costs
            no more than one extra forward.
        optimizer: its state is part of every peak, and its update may be the peak.
        loss: computes the loss from what the module returns; None is a sum, which keeps nothing for backward.
        profile: run the module's calls a few times on its device, and choose by their times instead of FLOPs and moved bytes;
            schedules of reversible chains in it are compared by FLOPs.
        compiled: the budget is for the compiled module: it is compiled, as it is or by Inductor, and a step measured, three
            times at most. None: where it is compiled, has values, and one process holds it.
        report: is told now and then what is being done, for a status line.
    Raises:
        InputError: a module, batch, optimizer or budget that cannot be used.
        BudgetError: no plan fits; names the smallest budget that would.
        MemoryError: with `profile`, not even the forward fits.
    """
    given, module = module, unwrap(module)
    if (obstacle := find_obstacle(module, batch)) and compiled:
        raise InputError(
            f"compiled=True runs the module. Received: {obstacle}. Leave it out: the budget then counts where it is compiled."
        )
    if compiled is None:
        compiled = budget is not None and is_compiled(given) and not obstacle
    setting, taken, limit = read_setting(module, batch), count_optimizer(module, optimizer), None
    if budget is not None:
        device = next(module.parameters()).device
        limit = parse_budget(budget, device, count_model_bytes(module))  # a wrong one is refused before anything is captured
    base: Record | None = None
    plans: list[tuple[ModulePlan, PlanDetails]] = []
    refusals: list[tuple[int, BudgetError]] = []
    with preserve_schedules(module), preserve_generators():
        for schedules in _list_schedules(module):
            set_schedules(module, schedules)
            report("planning: capturing the graph")
            measured = measure_graphs(module, batch) if profile else None
            with _capture(module, batch, loss) as (captured, step):
                base = base or step
                times = None if measured is None else assign_times(measured, captured.calls)
                planner = _Planner(captured, step, base, taken, loss, setting, schedules, times, report)
                try:
                    if (plan := planner.plan(limit)) is not None:
                        plans.append(plan)
                except BudgetError as error:
                    refusals.append((planner.least_peak, error))
                    if compiled and limit is not None and planner.update_peak <= limit:
                        plans.append(planner.plan_least())
            if limit is not None and step is base and planner.stored_peak <= limit:
                break  # nothing takes less work
    if not plans:
        raise min(refusals, key=lambda each: each[0])[1]
    if limit is None:
        best, details = min(plans, key=lambda each: each[0].peak_bytes)
    else:
        best, details = min(plans, key=lambda each: (each[0].peak_bytes > limit, each[0].extra_flops))
        if compiled:
            report("planning: compiling")
            best = fit_compiled(replace(best, budget_bytes=limit), given, batch, loss, taken.update)
    peaks = [*(each.min_peak_bytes or each.peak_bytes for each, _ in plans), *(least for least, _ in refusals)]
    return replace(best, min_peak_bytes=min(peaks)) if len(peaks) > 1 else best, details


def reforward(
    module: nn.Module,
    batch: Any,
    budget: str | int | None = None,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    loss: LossFunction | None = None,
) -> nn.Module:
    """Plan a module and apply the plan; return the module.

    Example:
        model = timm.create_model("resnet50")
        revzoo.reforward(model, images)  # trains as before, in a fraction of the memory

    Args:
        module: any, set up as it will be trained.
        batch: as for `revzoo.plan`.
        budget: as for `revzoo.plan`; None is the smallest peak that costs no more than one extra forward.
        optimizer: its state is part of every peak, and its update may be the peak.
        loss: as for `revzoo.plan`.
    Raises:
        InputError: a module, batch, optimizer or budget that cannot be used.
        BudgetError: no plan fits; names the smallest budget that would.
    """
    plan_module(module, batch, budget, optimizer=optimizer, loss=loss)[0].apply(module, batch)
    return module


def _list_schedules(module: nn.Module) -> Iterator[Schedules]:
    """Yield the schedules to plan with for a module that holds reversible chains, by path of the chain.

    A chain whose units all store is captured together with the code around it, so spans may lie in it. A chain that inverts or
    recomputes runs between graphs, as it would without a plan. Which is better depends on the budget, so both are planned, and
    so is a third schedule, where only the first half of all units keeps its present modes. A chain on a grid keeps its
    schedule: if it were captured, its rounding would keep more. Of nested chains, the outermost has the schedule.
    """
    outermost: dict[str, Chain] = {}
    for prefix, chain in find_chains(module).items():
        if not prefix.startswith(tuple(outermost)):
            outermost[prefix] = chain
    own = {
        prefix.removesuffix("."): chain.schedule
        for prefix, chain in outermost.items()
        if isinstance(chain, nn.Module) and not _is_on_grid(chain)
    }
    units = [(path, mode) for path, modes in own.items() for mode in modes]
    tried: list[Schedules] = []
    for count in (0, len(units) // 2, len(units)):  # of the first units, which keep their modes
        schedules: dict[str, list[Mode]] = {path: [] for path in own}
        for number, (path, mode) in enumerate(units):
            schedules[path].append(mode if number < count else Mode.STORE)
        if schedules not in tried:
            tried.append(schedules)
            yield schedules


def _is_on_grid(chain: nn.Module) -> bool:
    return any(getattr(m, "exact", False) or any(c.is_exact for c in getattr(m, "couplings", ())) for m in chain.modules())


@contextmanager
def _capture(module: nn.Module, batch: Any, loss: LossFunction | None) -> Iterator[tuple[Capture, Record]]:
    """Yield a captured module and its recorded step; with values where backward, a hook or the loss needs them."""
    with ExitStack() as stack:
        try:
            captured = stack.enter_context(capture(module, batch))
            step = record(captured, loss)
        except (DataDependentOutputException, DynamicOutputShapeException, FakeKernelError):
            stack.close()
            captured = stack.enter_context(capture(module, batch, with_values=True))
            step = record(captured, loss)
        yield captured, step


@dataclass(frozen=True)
class _Planner:
    """Plans a captured module with some schedules of its chains.

    Args:
        captured: the module.
        step: its record.
        base: the record of the step that stores everything, in its chains too.
        optimizer: what the optimizer takes.
        loss: as for `plan_module`.
        setting: what plans hold for.
        schedules: of the chains in the module.
        times: of the calls; None where FLOPs are the price.
        report: as for `plan_module`.
    """

    captured: Capture
    step: Record
    base: Record
    optimizer: OptimizerBytes
    loss: LossFunction | None
    setting: Setting
    schedules: Schedules
    times: CallTimes | None
    report: Report

    def plan(self, budget: int | None) -> tuple[ModulePlan, PlanDetails] | None:
        """Return the plan for a budget; None if without one nothing takes at most one more forward.

        Raises:
            BudgetError: no plan fits.
        """
        if budget is None:
            most_flops = sum(self.base.flops) - self._more_flops
            if most_flops < 0:
                return None
            spans = self.front.make_spans(self.front.choose_least(most_flops))
            counted = count_step(self.captured, spans, self.loss)
            peak = self._add_optimizer(counted.peak_bytes)
            return self.plan(self.stored_peak) if self.stored_peak < peak else self._make_plan(spans, counted, peak)
        if self.stored_peak > budget:
            return self._make_plan(*self._fit(budget), budget)
        atoms = self.step.atoms
        stored = replace(Spans.keep_all(atoms), ends=[*self.step.walls, len(atoms)])
        counted = count_step(self.captured, stored, self.loss)
        peak = self._add_optimizer(counted.peak_bytes)
        if not self.schedules:  # then such a plan leaves the module as it is
            try:
                peak = self._add_optimizer(count_own_peak(self.captured, self.loss))
            except Exception:  # what the compiler left out, or did in another way, may need values
                peak = budget + 1
            if peak > budget:
                return self._make_plan(stored, counted, budget, is_searched=False)
        notes = [f"Everything is stored: the budget is above the {format_bytes(peak)} that this takes."]
        nothing = Spans(atoms, (), frozenset(), frozenset())  # is recovered
        notes = notes if self.base is self.step else []
        plan, details = self._make_plan(nothing, counted, budget, notes, is_searched=False)
        return replace(plan, peak_bytes=peak), details

    def plan_least(self) -> tuple[ModulePlan, PlanDetails]:
        """Return the plan with the smallest peak, which is above the budget."""
        return self._make_plan(*self.least, self.least_peak)

    @property
    def stored_peak(self) -> int:
        """The peak of storing everything, but for chains whose schedules do not."""
        return self._add_optimizer(self.step.peak_bytes)

    @property
    def update_peak(self) -> int:
        """The peak of the optimizer's update."""
        return self._add_optimizer(0)

    @cached_property
    def front(self) -> Front:
        nanoseconds = None if self.times is None else self.times.in_nanoseconds()[0]
        return find_front(self.step, nanoseconds=nanoseconds, report=self.report)

    @cached_property
    def least(self) -> tuple[Spans, SpannedStep]:
        """The plan whose step is counted the smallest, of the few that are predicted to be, and its step."""
        found: list[tuple[Spans, SpannedStep]] = []
        for predicted, _ in self.front.list_points()[:_FEW]:
            if found and predicted >= min(counted.peak_bytes for _, counted in found):
                break
            spans = self.front.make_spans(self.front.choose(predicted) or ())
            self.report("planning: counting a step")
            found.append((spans, count_step(self.captured, spans, self.loss)))
        return min(found, key=lambda each: each[1].peak_bytes)

    @property
    def least_peak(self) -> int:
        return min(self._add_optimizer(self.least[1].peak_bytes), self.stored_peak)

    def _list_front(self) -> list[FrontPoint]:
        peaks = [peak for peak, _ in self.front.list_points()]
        rows = []
        for k in sorted({round(i * (len(peaks) - 1) / (_POINTS - 1)) for i in range(_POINTS)}):
            chosen = self.front.choose(peaks[k]) or ()
            seconds = None if self.times is None else sum(option.made for option in chosen) / 1e9
            flops = sum(option.flops for option in chosen) + self._more_flops
            rows.append(FrontPoint(peaks[k] + self.optimizer.state, flops, seconds))
        return rows

    @property
    def _more_flops(self) -> int:
        """The FLOPs of storing everything but for chains whose schedules do not, beyond those of storing everything."""
        return self.step.total_flops - self.base.total_flops

    def _add_optimizer(self, peak: int) -> int:
        """Return the peak of the step with the optimizer, given that of forward and backward."""
        return max(peak, self.step.left_bytes + self.optimizer.update) + self.optimizer.state

    def _fit(self, budget: int) -> tuple[Spans, SpannedStep]:
        """Return the spans with the least work whose counted peak is within the budget, and their step.

        A count may be above what was predicted, so the smallest plan is counted, too, before a budget is refused.
        """
        predicted = [peak for peak, _ in self.front.list_points()]
        room = budget - self.optimizer.state if self.update_peak <= budget else 0
        number = bisect_right(predicted, room)
        while number > 1:
            spans = self.front.make_spans(self.front.choose(predicted[number - 1]) or ())
            self.report("planning: counting a step")
            counted = count_step(self.captured, spans, self.loss)
            peak = self._add_optimizer(counted.peak_bytes)
            if peak <= budget:
                return spans, counted
            number = bisect_right(predicted, predicted[number - 1] - (peak - budget))
        if self._add_optimizer(self.least[1].peak_bytes) <= budget:
            return self.least
        fixed = format_bytes(self.step.fixed_bytes + self.optimizer.state)
        least = self.least_peak
        where, remedy = self.front.name_bottleneck(), "Try a smaller batch, autocast, or an optimizer of less state."
        if least == self.update_peak:
            where, remedy = "at the optimizer's update", "Try foreach=False, or an optimizer of less state."
        raise BudgetError(
            f"No plan fits {format_bytes(budget)}: at least {format_bytes(least)} ({least} bytes) are needed, {where}. Of "
            f"these {fixed} are weights, optimizer state and batch. {' '.join([remedy, *self._describe_graphs()])}"
        )

    def _make_plan(
        self, spans: Spans, counted: SpannedStep, budget: int, notes: Sequence[str] = (), *, is_searched: bool = True
    ) -> tuple[ModulePlan, PlanDetails]:
        """Return a plan and its details."""
        peak, state = self._add_optimizer(counted.peak_bytes), self.optimizer.state
        seconds = stored_seconds = spread = None
        if self.times is not None and self.base is self.step:
            stored_seconds, spread = self.times.step
            seconds = stored_seconds + sum(self.times.forward[i].seconds for i in counted.reruns)
        plan = ModulePlan(
            graphs=tuple(GraphPlan.of(each, spans.take(each.numbers)) for each in self.captured.calls),
            schedules=tuple((path, tuple(modes)) for path, modes in self.schedules.items()),
            peak_bytes=peak,
            budget_bytes=budget,
            extra_flops=counted.flops - self.base.total_flops,
            total_flops=self.base.total_flops,
            min_peak_bytes=min(self.least_peak, peak) if is_searched else None,
            no_recompute_peak_bytes=self._add_optimizer(self.base.peak_bytes),
            left_bytes=self.step.left_bytes + state,
            gradient_bytes=self.step.left_bytes - self.step.fixed_bytes,
            loss_bytes=self.step.loss_bytes,
            setting=self.setting,
            assumes=self.captured.assumes,
            notes=(*notes, *self._describe(self.front.lost_work if is_searched else 0)),
            seconds=seconds,
            stored_seconds=stored_seconds,
            spread=spread,
        )
        stored = FrontPoint(counted.peak_bytes + state, self._more_flops, None if self.times is None else 0.0)
        return plan, describe_step(counted, self.step, self._list_front() if is_searched else [stored], state, self.times)

    def _describe(self, lost: int) -> Iterator[str]:
        """Yield what a reader of a plan should know of the module and its search."""
        yield from self.captured.notes
        for path, modes in self.schedules.items():
            if counts := Counter(mode for mode in modes if mode.drops):
                parts = join_names([f"{count} {mode}" for mode, count in counts.items()])
                yield f"Of the {len(modes)} units of {path}, {parts}."
        yield from self._describe_graphs()
        if lost:
            whole, what = (self.step.total_flops, "FLOPs") if self.times is None else (self.times.step.seconds * 1e9, "time")
            yield (
                "Plans were too many to compare them all: one of those left out may take less work, by at most "
                f"{100 * lost / max(1, whole):.2g} % of the training step's {what}."
            )

    def _describe_graphs(self) -> Iterator[str]:
        count = len(self.captured.calls)
        if count != 1:
            yield from describe_backward_hooks(self.captured.module)
        if not count:
            yield f"torch.compile captures nothing of {self.setting.model}, so everything is stored."
            yield from describe_modes()
        if count > 1:
            kept = sum(s.bytes for s in self.step.storages if s.released >= 0 and not self.step.atoms[s.born].nodes)
            yield (
                f"For torch.compile the forward is {count} graphs. What runs between them keeps {format_bytes(kept)}, whatever "
                "the plan. torch._dynamo.explain(module)(batch) says where they end."
            )
