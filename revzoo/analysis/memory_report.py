"""Where the memory of a training step goes: counted, exactly, on any device or on none."""

import copy
import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from revzoo.analysis.dry_run import call, chains, isolated, linear_loss, require_module, scheduled
from revzoo.errors import InputError
from revzoo.format import format_bytes
from revzoo.runtime.drift import growth_unchecked
from revzoo.runtime.live_bytes import LiveBytes
from revzoo.runtime.schedule import MODES


@dataclass(frozen=True)
class MemoryReport:
    """Bytes of one forward and backward.

    Args:
        peak_bytes: everything alive at the peak: weights, buffers, those gradients that exist by then, the optimizer's
            state if given, batch and activations.
        activation_bytes: the peak of everything above weights, buffers, parameter gradients, optimizer state and batch:
            activations, their gradients and temporaries. The only part that a schedule changes.
        after_forward_bytes: what of that waits for backward between the two (the outputs are in the loss by then).
        gradient_bytes: all parameter gradients, as after backward.
        optimizer_bytes: the optimizer's state, as after a step; 0 when none was given.
        allocator_peak_bytes: the CUDA allocator's own peak, with kernel workspaces and whatever else is on the card.
        allocator_reserved_bytes: the CUDA allocator's peak of memory taken from the driver, which `nvidia-smi` shows.
    """

    peak_bytes: int
    activation_bytes: int
    after_forward_bytes: int
    weight_bytes: int
    buffer_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    batch_bytes: int
    allocator_peak_bytes: int | None = None
    allocator_reserved_bytes: int | None = None

    def to_dict(self) -> dict[str, int | None]:
        """Return the fields by name."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        rows = [(label, getattr(self, field)) for field, label in LABELS.items() if getattr(self, field) is not None]
        width = max(len(label) for label, _ in rows)
        return "\n".join(f"{label:<{width}}  {format_bytes(size):>10}" for label, size in rows)


LABELS = {
    "weight_bytes": "weights",
    "buffer_bytes": "buffers",
    "gradient_bytes": "gradients",
    "optimizer_bytes": "optimizer state",
    "batch_bytes": "batch",
    "after_forward_bytes": "activations after forward",
    "activation_bytes": "activations at the peak",
    "peak_bytes": "peak of everything",
    "allocator_peak_bytes": "CUDA peak allocated",
    "allocator_reserved_bytes": "CUDA peak reserved",
}


def measure_memory(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer | None = None) -> MemoryReport:
    """Count what one forward and backward of the model holds in memory.

    The loss is the sum of all outputs, which saves nothing, with a gradient of its own as a real loss has; the outputs
    are let go before backward. The step is run as the model is now (schedule, training flag, surrounding autocast) and
    leaves no trace: gradients, buffers and random streams are put back; on CUDA the allocator's peak is reset.

    Args:
        model: any module. With FakeTensor or meta parameters nothing is allocated: the step runs under `FakeTensorMode`.
        batch: a tensor, a tuple or list of positional arguments, or a mapping of keyword arguments.
        optimizer: counts its state too, foreseen without allocating it when no step has been made yet. Its step itself is
            not run, so temporaries of the update are not in the peak.
    Raises:
        InputError: not a module, an unusable batch, nothing to differentiate, or an optimizer that is of other parameters
            or whose state cannot be foreseen.
    """
    state = state_bytes(model, optimizer)
    with isolated(model, batch) as inputs:
        return measured(model, inputs, state)[0]


def measured(
    model: nn.Module, batch: Any, optimizer_bytes: int = 0, units: Sequence[str] = ()
) -> tuple[MemoryReport, dict[str, int]]:
    """Run a forward and backward of a isolated model; return its report, and what each unit leaves waiting for backward.

    Additions that follow a unit count to it, as do the streams that a chain of inverted steps ends with; a mask that is
    made before the first unit counts to that.

    Args:
        units: modules of the model that are called one after the other, the first of them first.
    """
    live = LiveBytes()
    weights = live.watch(model.parameters())
    buffers = live.watch(model.buffers()) - weights
    inputs = live.watch(batch) - weights - buffers
    with _allocator_peaks(model) as peaks, live:
        with _beginnings(model, units, live) as begins:
            outputs = call(model, batch)
        behind = live.now()
        loss = linear_loss(outputs)
        del outputs
        forward = live.now()
        loss.backward()
        gradients = live.watch(p.grad for p in model.parameters())
    lasting = weights | buffers | inputs | gradients
    report = MemoryReport(
        peak_bytes=live.peak() + optimizer_bytes,
        activation_bytes=live.peak(without=lasting),
        after_forward_bytes=live.alive(without=lasting, at=forward),
        weight_bytes=live.size(weights),
        buffer_bytes=live.size(buffers),
        gradient_bytes=live.size(gradients),
        optimizer_bytes=optimizer_bytes,
        batch_bytes=live.size(inputs),
        **peaks,
    )
    kept = live.alive_by_birth([0, *list(begins.values())[1:], behind], without=lasting, at=forward)
    return report, dict(zip(begins, kept, strict=False))  # behind the last unit there is the loss


@contextmanager
def _beginnings(model: nn.Module, units: Sequence[str], live: LiveBytes) -> Iterator[dict[str, int]]:
    """Yield a mapping that gets the moment at which each unit is called."""
    begins: dict[str, int] = {}

    def note(unit: str, *_: Any) -> None:
        begins[unit] = live.now()

    hooks = [model.get_submodule(unit).register_forward_pre_hook(partial(note, unit)) for unit in units]
    try:
        yield begins
    finally:
        for hook in hooks:
            hook.remove()


def measure_modes(
    model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer | None = None
) -> tuple[dict[str, MemoryReport], str | None]:
    """Measure a training step in every mode without allocating anything, so that `store` is measured even if it cannot run.

    Args: as `measure_memory`.
    Returns: a report for each mode ("as it is" for a model without a schedule), and the mode in force (None: mixed).
    """
    state = state_bytes(model, optimizer)
    in_force = [chain.schedule for chain in chains(model).values()]
    reports: dict[str, MemoryReport] = {}
    current: str | None = None
    with scheduled(model) as assign:
        for mode in MODES if in_force else ():
            assign(mode)
            current = mode if [chain.schedule for chain in chains(model).values()] == in_force else current
            with isolated(model, batch, fake=True) as inputs, growth_unchecked():
                reports[mode], _ = measured(model, inputs, state)
    if not in_force:
        with isolated(model, batch, fake=True) as inputs:
            reports["as it is"], _ = measured(model, inputs, state)
    return reports, current


def state_bytes(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> int:
    """Return the bytes of an optimizer's state; before its first step, of the state that step will make."""
    require_module(model)
    if optimizer is None:
        return 0
    optimizer = getattr(optimizer, "optimizer", optimizer)  # out of Accelerate's wrapper
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InputError(f"The optimizer must be a torch.optim.Optimizer. Received: {type(optimizer).__name__}.")
    if not {id(p) for group in optimizer.param_groups for p in group["params"]} <= set(map(id, model.parameters())):
        raise InputError("The optimizer has parameters that are not the model's. Make it from model.parameters().")
    if optimizer.state:
        return _total_bytes(optimizer.state.values())
    with torch.random.fork_rng(devices=[]):
        return sum(_foreseen_bytes(optimizer, group) for group in optimizer.param_groups)


def _foreseen_bytes(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> int:
    """Try a step on one real stand-in for each kind of parameter (many optimizers cannot step on FakeTensors)."""
    total = 0
    nobody = nn.Parameter(torch.empty(0))
    memo = {id(p): nobody for g in optimizer.param_groups for p in g["params"]}  # deepcopy copies no parameter
    for (shape, dtype, device), count in Counter(_kind(p) for p in group["params"] if p.requires_grad).items():
        twin = copy.deepcopy(optimizer, dict(memo))
        p = nn.Parameter(torch.zeros(shape, dtype=dtype, device=device))
        p.grad = torch.ones_like(p)
        twin.param_groups = [{**group, "params": [p]}]
        try:
            twin.step()
        except Exception as error:
            raise InputError(
                f"The state of {type(optimizer).__name__} cannot be foreseen ({type(error).__name__}: {error}). Measure "
                "without the optimizer, or after its first step."
            ) from error
        total += count * _total_bytes(twin.state.values())
    return total


def _kind(p: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return p.shape, p.dtype, torch.device("cpu") if p.is_meta or isinstance(p, FakeTensor) else p.device


def _total_bytes(tensors: Any) -> int:
    live = LiveBytes()
    return live.size(live.watch(tensors))


@contextmanager
def _allocator_peaks(model: nn.Module) -> Iterator[dict[str, int]]:
    """Yield a mapping that holds the CUDA allocator's peaks at the end; it stays empty elsewhere."""
    peaks: dict[str, int] = {}
    devices = {p.device for p in model.parameters() if p.is_cuda and not isinstance(p, FakeTensor)}
    for device in devices:
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()  # else what earlier work left reserved is counted
        torch.cuda.reset_peak_memory_stats(device)
    yield peaks
    if devices:
        peaks["allocator_peak_bytes"] = sum(torch.cuda.max_memory_allocated(device) for device in devices)
        peaks["allocator_reserved_bytes"] = sum(torch.cuda.max_memory_reserved(device) for device in devices)
