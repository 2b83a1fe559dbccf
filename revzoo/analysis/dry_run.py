"""One forward and backward on somebody's model, which is left exactly as it was found."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from revzoo.errors import InputError
from revzoo.model.network import Model
from revzoo.runtime.chain import ReversibleChain
from revzoo.runtime.nested import map_tensors, tensors_in
from revzoo.runtime.schedule import Mode


@contextmanager
def isolated(model: nn.Module, batch: Any, fake: bool = False) -> Iterator[Any]:
    """Let a trial use the model, take every trace of it back afterwards, and yield the batch to use.

    Put back are parameter gradients (they start as None), buffers such as BatchNorm statistics, and the random streams.
    Parameters that are FakeTensors or on the meta device, or `fake=True`, make it a trial under `FakeTensorMode`: shapes
    and bytes are right, nothing is allocated and no number is computed. (PyTorch's fake BatchNorm takes the statistics of
    half-precision inputs for half precision, where the kernel keeps float32: a few bytes a channel are missed.)

    Args:
        batch: a tensor, a tuple or list of positional arguments, or a mapping of keyword arguments.
    Raises:
        InputError: not a module, no tensor or no example in the batch, a batch without values for parameters that have
            some (unless `fake`), or no parameter requires a gradient.
    """
    require_module(model)
    inputs = list(tensors_in(batch))
    if not inputs:
        raise InputError(f"The batch must hold at least one tensor. Received: {type(batch).__name__}.")
    if not any(t.numel() for t in inputs):
        raise InputError(f"The batch must hold at least one example. Received: {[tuple(t.shape) for t in inputs]}.")
    if not any(p.requires_grad for p in model.parameters()):
        raise InputError("No parameter of the model requires a gradient, so there is no backward to look at.")
    if not fake and any(map(_valueless, inputs)) and not any(map(_valueless, model.parameters())):
        raise InputError("The model's parameters have values. Received: a meta or fake batch. Give both values, or neither.")
    tensors = [*model.parameters(), *model.buffers(), *inputs]
    home = next((t.device for t in [*inputs, *tensors] if not t.is_meta), torch.device("cpu"))
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        torch.clear_autocast_cache()  # casts of an earlier trial
        stack.callback(torch.clear_autocast_cache)
        for card in {t.device for t in tensors if t.device.type not in ("cpu", "meta") and not isinstance(t, FakeTensor)}:
            stack.enter_context(torch.random.fork_rng(devices=[card], device_type=card.type))
        if mode := fake_mode(tensors, always=fake):
            batch = map_tensors(lambda t: faked(t, mode, home).requires_grad_(t.requires_grad), batch)
            _swap(model, stack, "_parameters", lambda p: nn.Parameter(faked(p, mode, home), p.requires_grad))
            _swap(model, stack, "_buffers", lambda b: faked(b, mode, home))
            stack.enter_context(mode)
        else:
            batch = map_tensors(lambda t: t.detach().requires_grad_(t.requires_grad), batch)  # t.grad stays as it is
            _swap(model, stack, "_buffers", _copied)
        for p in model.parameters():
            stack.callback(setattr, p, "grad", p.grad)
            p.grad = None
        stack.enter_context(torch.enable_grad())
        yield batch


def require_module(model: object) -> None:
    """Raise InputError unless the model is a module."""
    if not isinstance(model, nn.Module):
        raise InputError(f"The model must be a torch.nn.Module. Received: {type(model).__name__}.")


def call(model: nn.Module, batch: Any) -> Any:
    """Return the model's output for a batch given as in `isolated`."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


def linear_loss(outputs: Any) -> Tensor:
    """Return the sum of all outputs that depend on a parameter; it saves nothing for backward.

    Unlike that of `y.sum()`, its gradient is a tensor of its own, as behind any real loss and as behind (y * w).sum():
    what the gradient of the outputs occupies is counted, and no kernel has to copy an expanded scalar.

    Raises:
        InputError: there is no such output.
    """
    parts = [_Total.apply(y) for y in differentiable(outputs)]
    total: Tensor = sum(parts[1:], parts[0])
    return total


def differentiable(outputs: Any) -> list[Tensor]:
    """Return the outputs that have a gradient.

    Raises:
        InputError: there is none.
    """
    found = [y for y in tensors_in(outputs) if y.requires_grad]
    if not found:
        raise InputError("No output of the model depends on a parameter that requires a gradient.")
    return found


def chains(model: nn.Module) -> dict[str, Model | ReversibleChain]:
    """Return everything in the model that has a schedule, by the path in front of its names ("" for the model itself)."""
    found = {name: m for name, m in model.named_modules() if isinstance(m, Model | ReversibleChain)}
    return {f"{name}." if name else "": chain for name, chain in found.items()}


def steps(model: nn.Module) -> Iterator[tuple[str, nn.Module, Mode]]:
    """Yield name, module and mode of every reversible step in the model."""
    for prefix, chain in chains(model).items():
        units = [entry for entry in chain.layout() if entry.is_unit]
        for unit, mode in zip(units, chain.schedule, strict=True):
            if unit.kind == "step":
                yield f"{prefix}{unit.name}", unit.module, mode


@contextmanager
def scheduled(model: nn.Module) -> Iterator[Callable[[Mode], None]]:
    """Yield a function that sets the mode of every step in the model; the schedules are put back afterwards."""
    found = {chain: chain.schedule for chain in chains(model).values()}

    def assign(mode: Mode) -> None:
        for chain in found:
            chain.schedule = mode

    try:
        yield assign
    finally:
        for chain, schedule in found.items():
            chain.schedule = schedule


def fake_mode(tensors: list[Tensor], always: bool = False) -> FakeTensorMode | None:
    """Return the mode of the first FakeTensor, a new one where `always` or a tensor on meta asks for it, else None."""
    for t in tensors:
        if isinstance(t, FakeTensor):
            return t.fake_mode
    return FakeTensorMode(allow_non_fake_inputs=True) if always or any(t.is_meta for t in tensors) else None


def faked(t: Tensor, mode: FakeTensorMode, home: torch.device) -> Tensor:
    """Return a FakeTensor like t, without a gradient; one on the meta device is taken to be at `home`."""
    if t.is_meta and not isinstance(t, FakeTensor):
        with mode:
            return torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device=home)
    return mode.from_tensor(t.detach())


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        ctx.shape = y.shape
        return y.sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0].expand(ctx.shape).contiguous()


def _valueless(t: Tensor) -> bool:
    return t.is_meta or isinstance(t, FakeTensor)


def _copied(buffer: Tensor) -> Tensor:
    expanded = 0 in buffer.stride()  # such a view cannot be written to, and a copy would be larger
    return buffer if expanded else buffer.clone()


def _swap(model: nn.Module, stack: ExitStack, table: str, convert: Callable[[Tensor], Tensor]) -> None:
    """Let converted tensors stand in for those of every module until the stack unwinds; shared ones stay shared."""
    stand_ins: dict[int, Tensor] = {}
    for module in model.modules():
        entries: dict[str, Tensor | None] = getattr(module, table)
        stack.callback(_restore, entries, dict(entries))
        for name, t in entries.items():
            if t is not None:
                if id(t) not in stand_ins:
                    stand_ins[id(t)] = convert(t)
                entries[name] = stand_ins[id(t)]


def _restore(entries: dict[str, Tensor | None], found: dict[str, Tensor | None]) -> None:
    entries.clear()
    entries.update(found)
