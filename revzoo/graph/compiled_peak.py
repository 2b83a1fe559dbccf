"""Plans for a module that is compiled: the memory of its step is measured, and it is planned again with what was found.

The search in the compiler counts the graph that it has cut. What a backend makes of that graph may take less or more: Inductor
writes several operations as one kernel, and puts them in an order of its own.
"""

import gc
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from torch._C._autograd import _disable_profiler_legacy, _enable_profiler_legacy, _profiler_enabled
from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig
from torch.autograd.profiler import record_function

from revzoo.analysis.autocast import leave_autocast
from revzoo.analysis.dry_run import LossFunction, call, compute_loss, isolated, memory_errors
from revzoo.device import forget_peak, has_streams, has_value
from revzoo.errors import BudgetError
from revzoo.format import format_bytes
from revzoo.graph.module_plan import ModulePlan, release
from revzoo.graph.refusal import unwrap
from revzoo.runtime.compiling import is_compiled
from revzoo.runtime.forward import processes_communicate
from revzoo.runtime.nested import tensors_in

_MOST_COMPILATIONS = 3
_ENOUGH = 0.97  # of what a budget leaves for activations and gradients: what is left is not worth compiling again
_SECOND = "revzoo: the second step"  # its name among the events
_SPARE = 0.02  # of it, taken off besides what a step was above it, since peaks fall in steps


def find_obstacle(module: nn.Module, batch: Any) -> str:
    """Return in words why a step cannot be measured; nothing if it can."""
    if not all(map(has_value, [*module.parameters(), *tensors_in(batch)])):
        return "tensors without values"
    if processes_communicate():
        return "one of several processes"
    return "a profiler around it" if _profiler_enabled() else ""


def fit_compiled(plan: ModulePlan, module: nn.Module, batch: Any, loss: LossFunction | None, update_bytes: int) -> ModulePlan:
    """Return a plan with which the compiled module stays within its budget: measured, after three compilations at most.

    Args:
        plan: of the module that is not compiled.
        module: it, compiled or not: then it is compiled by Inductor.
        batch: a tensor, a tuple or list of positional arguments, or a mapping of keyword arguments.
        loss: computes the loss from what the module returns; None is a sum.
        update_bytes: what the optimizer's update takes besides weights, gradients, its state and the batch.
    Raises:
        BudgetError: it takes more, whatever runs again.
        MemoryError: there is not enough memory for the step.
    """
    fixed, at_update = plan.left_bytes - plan.gradient_bytes, plan.left_bytes + update_bytes

    def measure(activation_bytes: int) -> int:
        tried = replace(plan, compiled_activation_bytes=activation_bytes)
        return max(fixed + _measure_peak(tried, module, batch, loss), at_update)

    peaks = search(measure, plan.budget_bytes, plan.budget_bytes - plan.left_bytes, plan.budget_bytes - fixed)
    fitting = [each for each in peaks.items() if each[1] <= plan.budget_bytes]
    if not fitting:
        least = min(peaks.values())
        raise BudgetError(
            f"No plan fits {format_bytes(plan.budget_bytes)}: compiled, {plan.setting.model} takes at least "
            f"{format_bytes(least)} ({least} bytes), measured on {plan.setting.device}. "
            + " ".join(["Try a larger budget, or a smaller batch.", *(note for note in plan.notes if "torch.compile" in note)])
        )
    activation_bytes, peak = max(fitting)
    measured = f"Compiled it takes {format_bytes(peak)}, measured on {plan.setting.device}."
    notes = (*plan.notes, measured)
    return replace(plan, compiled_activation_bytes=activation_bytes, compiled_peak_bytes=peak, notes=notes)


def search(measure: Callable[[int], int], budget: int, first: int, room: int) -> dict[int, int]:
    """Return the peaks that were measured by limit for activations; the last is for 0 where no other is within the budget.

    Args:
        measure: returns the peak with a limit for activations.
        budget: for the peak.
        first: limit to begin with.
        room: what the budget leaves for activations and gradients.
    """
    peaks, limit = dict[int, int](), max(0, first)
    while limit not in peaks and len(peaks) < _MOST_COMPILATIONS:
        before, peaks[limit] = set(peaks.values()), measure(limit)
        left = budget - peaks[limit]
        if 0 <= left <= (1 - _ENOUGH) * room or (left >= 0 and peaks[limit] in before):
            break
        limit = max(0, limit + left - int(_SPARE * room) * (left < 0))
        if len(peaks) == _MOST_COMPILATIONS - 1 and min(peaks.values()) > budget:
            limit = 0
    return peaks


def _measure_peak(plan: ModulePlan, module: nn.Module, batch: Any, loss: LossFunction | None) -> int:
    """Return the most bytes of activations and gradients in a step of a compiled module. It is left as it was."""
    own, compiled = unwrap(module), module if is_compiled(module) else torch.compile(module)
    plan.apply(own)
    try:
        with isolated(own, batch) as inputs, memory_errors():

            def step() -> None:
                for each in (*own.parameters(), *tensors_in(inputs)):
                    each.grad = None
                total = compute_loss(loss, call(compiled, inputs))
                with leave_autocast():
                    total.backward()

            return _watch(step, next(own.parameters()).device)
    finally:
        release(own)


def _watch(step: Callable[[], None], device: torch.device) -> int:
    """Return the most bytes that the second of two steps has allocated and not freed, with what the first has left."""
    gc.collect()  # what is freed later would count
    if has_streams(device):
        before = torch.accelerator.memory_allocated(device)
        step()
        gc.collect()  # frames of the compiler, which hold tensors
        forget_peak(device)
        step()
        return torch.accelerator.max_memory_allocated(device) - before
    # PyTorch's newer profiler writes lines of its own to the terminal. This one was tried with 2.10 and 2.14.
    _enable_profiler_legacy(ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig()))
    try:
        step()
        gc.collect()
        with record_function(_SECOND):
            step()
    finally:
        events = [event for thread in _disable_profiler_legacy() for event in thread]
    alive = [*accumulate(event.cpu_memory_usage() for event in events)]
    return max(alive[next(i for i, event in enumerate(events) if event.name() == _SECOND) :])
