"""Count the memory of a training step: weights, gradients, batch and activations, to the byte, with or without a device."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from revzoo.analysis.autocast import leave_autocast
from revzoo.analysis.chains import find_chains, preserve_schedules
from revzoo.analysis.dry_run import LossFunction, call, compute_loss, isolated, require_whole, updates_in_backward
from revzoo.analysis.optimizer_step import NO_OPTIMIZER, OptimizerBytes, count_optimizer, count_updates_apart
from revzoo.analysis.report import MemoryReport
from revzoo.device import forget_peak, has_streams
from revzoo.errors import MissingValueError
from revzoo.runtime.drift import ignore_error_growth
from revzoo.runtime.live_bytes import LiveBytes, LiveBytesOfReplacedCalls
from revzoo.runtime.mode import MODES, Mode
from revzoo.runtime.observation import observe_calls
from revzoo.runtime.replaced_call import is_replaced

AS_IT_IS = "as it is"  # the present schedule, or none


def measure_memory(
    model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer | None = None, *, loss: LossFunction | None = None
) -> MemoryReport:
    """Run one forward and backward of the model and count the memory that they take.

    The model runs as it is now: its schedule, its training flag, and autocast if it is active. Afterwards weights, gradients,
    buffers, batch and random generators are as before; only the peak statistics of the CUDA allocator are reset.

    Args:
        model: any module. If its parameters are FakeTensors or on the meta device, it runs under `FakeTensorMode`, and nothing
            is allocated.
        batch: a tensor, a tuple or list of positional arguments, or a mapping of keyword arguments.
        optimizer: its state is counted too; before its first step, the state that this step will create. So is what its
            update takes besides that, after backward.
        loss: computes the loss from what the model returns; None is the sum of all outputs, which saves nothing for backward:
            the outputs are freed before it begins.
    Raises:
        InputError: the model is no module; the batch has no tensor or no example; nothing requires a gradient; the loss is not
            one number; or the optimizer has other parameters than the model's, or a state that cannot be predicted.
    """
    taken = count_optimizer(model, optimizer)
    with isolated(model, batch) as inputs:
        return run_and_measure(model, inputs, taken, loss=loss).memory


def count_memory(model: nn.Module, batch: Any, loss: LossFunction | None = None, *, fake: bool = True) -> MemoryReport:
    """Do as `measure_memory`, without values (unless `fake` is false, or the model asks for some) and whatever errors grow."""
    with ignore_error_growth():
        try:
            with isolated(model, batch, fake=fake) as inputs:
                return run_and_measure(model, inputs, loss=loss).memory
        except MissingValueError:  # a mixture of experts, for example
            return measure_memory(model, batch, loss=loss)


class CountedStep(NamedTuple):
    """What one forward and backward take.

    Args:
        memory: of all of it.
        kept: bytes that each unit keeps for backward. A tensor is attributed to the last unit called before it was created:
            additions after a unit to that unit, and so are the final streams of a run of inverted steps. What is created
            before the first unit is attributed to the first.
    """

    memory: MemoryReport
    kept: dict[str, int]


def run_and_measure(
    model: nn.Module,
    batch: Any,
    optimizer: OptimizerBytes = NO_OPTIMIZER,
    *,
    units: Sequence[str] = (),
    loss: LossFunction | None = None,
    other_bytes: int | None = None,
) -> CountedStep:
    """Run a forward and backward inside `isolated`, and count what it takes.

    Args:
        model: the module to run.
        batch: as yielded by `isolated`.
        optimizer: what the optimizer takes.
        units: names of submodules, in the order of their calls.
        loss: as for `measure_memory`.
        other_bytes: what else is alive during the whole step.
    """
    live = LiveBytesOfReplacedCalls() if any(map(is_replaced, model.modules())) else LiveBytes()
    weights = live.watch(model.parameters())
    buffers = live.watch(model.buffers()) - weights
    inputs = live.watch(batch) - weights - buffers
    with _record_allocator_peaks(model) as peaks, live:
        with _record_starts(model, units, live) as starts:
            outputs = call(model, batch)
        end = live.now()
        total = compute_loss(loss, outputs)
        del outputs
        with leave_autocast():
            forward = live.now()
            total.backward()
        gradients = live.watch(p.grad for p in model.parameters())
    lasting = weights | buffers | inputs | gradients
    memory = MemoryReport(
        peak_bytes=max(live.peak(), live.alive() + optimizer.update) + optimizer.state + (other_bytes or 0),
        activation_bytes=live.peak(without=lasting),
        after_forward_bytes=live.alive(without=lasting, at=forward),
        weight_bytes=live.size(weights),
        buffer_bytes=live.size(buffers),
        gradient_bytes=live.size(gradients),
        optimizer_bytes=optimizer.state,
        update_bytes=optimizer.update,
        batch_bytes=live.size(inputs),
        other_bytes=other_bytes,
        **peaks,
    )
    kept = live.alive_by_birth([0, *list(starts.values())[1:], end], without=lasting, at=forward)
    kept_by_unit = dict(zip(starts, kept, strict=False))  # the last entry of `kept` is the loss
    return CountedStep(memory, kept_by_unit)


@contextmanager
def _record_starts(model: nn.Module, units: Sequence[str], live: LiveBytes) -> Iterator[dict[str, int]]:
    """Yield a mapping to which each unit adds, when it is called, its position in the log of `live`."""
    names, starts = {id(model.get_submodule(unit)): unit for unit in units}, dict[str, int]()

    def begin_call(module: nn.Module, *_: Any) -> None:
        if (unit := names.get(id(module))) is not None:
            starts[unit] = live.now()

    with observe_calls(begin_call):
        yield starts


def measure_modes(
    model: nn.Module,
    batch: Any,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    in_backward: bool = False,
    loss: LossFunction | None = None,
    other_bytes: int | None = None,
    modes: Sequence[str] = MODES,
) -> tuple[dict[str, MemoryReport], str | None]:
    """Measure a training step in every mode without allocating anything: also in modes that do not fit the device.

    Args:
        model, batch, optimizer: as for `measure_memory`. The batch may be on the meta device.
        in_backward: whether the optimizer updates each parameter inside backward. No gradients are then left after it, and
            what one takes besides its update counts with the activations.
        loss, other_bytes: as for `run_and_measure`.
        modes: which ones; AS_IT_IS, first if at all, is the network's present schedule.
    Raises:
        InputError: as `measure_memory`, or processes divide the model. MissingValueError, which is one, if the model asks for
            the value of a tensor.
    Returns: a report for each mode (one report, AS_IT_IS, for a model without a schedule), and the model's present mode (None:
        its schedule mixes modes, or it was not among those measured).
    """
    require_whole(model)
    taken = count_optimizer(model, optimizer)
    updates: AbstractContextManager[None] = nullcontext()
    if in_backward and optimizer is not None:
        taken, updates = replace(taken, update=0), updates_in_backward(model, count_updates_apart(model, optimizer))
    present = [chain.schedule for chain in find_chains(model).values()]
    reports: dict[str, MemoryReport] = {}
    current: str | None = None
    with preserve_schedules(model) as assign, updates:
        for mode in modes if present else (AS_IT_IS,):
            if mode != AS_IT_IS:
                assign(Mode(mode))
                current = mode if [chain.schedule for chain in find_chains(model).values()] == present else current
            with isolated(model, batch, fake=True) as inputs, ignore_error_growth():
                reports[mode] = run_and_measure(model, inputs, taken, loss=loss, other_bytes=other_bytes).memory
    return reports, current


@contextmanager
def _record_allocator_peaks(model: nn.Module) -> Iterator[dict[str, int]]:
    """Yield a mapping to which the peaks of an accelerator's allocator are added at the end; on a CPU it stays empty."""
    peaks: dict[str, int] = {}
    devices = {p.device for p in model.parameters() if has_streams(p.device) and not isinstance(p, FakeTensor)}
    for device in devices:
        torch.accelerator.synchronize(device)
        forget_peak(device)
    yield peaks
    if devices:
        peaks["allocator_peak_bytes"] = sum(map(torch.accelerator.max_memory_allocated, devices))
        peaks["allocator_reserved_bytes"] = sum(map(torch.accelerator.max_memory_reserved, devices))
