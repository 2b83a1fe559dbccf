"""Split the memory of a training step into hidden activations z, their gradients g, and temporaries, for each pixel.

The terms are those of Hascoet et al. 2023, section 3. Every operation is logged with the storages that it reads and makes, and
the autograd node in whose backward it runs. What a storage is at some time follows from this log alone, so nothing here knows
layers, modes or the runtime:

    gradient        is computed from the gradient of the loss. All other storages hold values of forward, first made or rebuilt.
    z               a value of forward that backward has yet to use: a gradient will be computed from it, or the backward of
                    another node will read it, to rebuild other values from it.
    g               a gradient that another node will read than the one that made it.
    temporaries     all else: what one operation hands to the next on the way, and what nobody reads again.

An operation has yet to read its inputs while it runs. The three terms add up to all bytes alive, to the byte.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from revzoo.analysis.autocast import leave_autocast
from revzoo.analysis.dry_run import LossFunction, call, compute_loss, isolated, require_module
from revzoo.errors import InputError
from revzoo.format import format_bytes
from revzoo.model.create import create
from revzoo.model.model import Model
from revzoo.runtime.live_bytes import DEVICE, LiveBytes, LiveBytesOfReplacedCalls, Storages
from revzoo.runtime.observation import observe_calls
from revzoo.runtime.replaced_call import is_replaced

PhaseName = Literal["forward", "backward"]


@dataclass(frozen=True)
class Peak:
    """The most bytes that are alive at once while a unit runs.

    Args:
        unit: name of the unit.
        phase: whether that is in its forward or in its backward.
        hidden_bytes: activations that backward has yet to use, z.
        gradient_bytes: gradients of activations, g.
        temporary_bytes: all else.
    """

    unit: str
    phase: PhaseName
    hidden_bytes: int
    gradient_bytes: int
    temporary_bytes: int

    @property
    def total_bytes(self) -> int:
        """The sum of the terms."""
        return self.hidden_bytes + self.gradient_bytes + self.temporary_bytes


@dataclass(frozen=True)
class PixelReport:
    """The memory of a training step, in the terms of Hascoet et al. 2023, section 3.

    Weights are apart, since they do not grow with the images. What grows is hidden activations z that backward has yet to use,
    their gradients g, and temporaries: a stage has the three at its own peak, and the peak of the training step is that of one
    stage. Buffers, gradients of weights, and the images themselves are left out, as in the paper.

    Args:
        images: number of images in the batch.
        size: height and width of an image.
        weight_bytes: all parameters, shared ones once.
        stages: the peak of every stage by its name, in order.
        counted_bytes: the peak as `revzoo.measure_memory` counts it, `activation_bytes`. The terms of the highest stage add up
            to it.
    """

    images: int
    size: tuple[int, int]
    weight_bytes: int
    stages: dict[str, Peak]
    counted_bytes: int

    @property
    def pixels(self) -> int:
        """The number of pixels in the batch."""
        return self.images * self.size[0] * self.size[1]

    @property
    def bytes_per_pixel(self) -> float:
        """The counted peak over the pixels."""
        return self.counted_bytes / self.pixels

    @property
    def peak_stage(self) -> str:
        """The name of the stage that has the peak."""
        return max(self.stages, key=lambda name: self.stages[name].total_bytes)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as mappings, lists and scalars, ready for JSON."""
        return asdict(self) | {"bytes_per_pixel": self.bytes_per_pixel, "peak_stage": self.peak_stage}

    def __str__(self) -> str:
        height, width = self.size
        longest = max(map(len, self.stages)) + 2  # with a mark
        lines = [
            f"{self.bytes_per_pixel:.1f} bytes per pixel of {self.images} images of {height} x {width} "
            f"({format_bytes(self.counted_bytes)}), and {format_bytes(self.weight_bytes)} of weights",
            f"{'stage':<{longest}}        z        g  temporaries      sum  at its peak in",
        ]
        for name, peak in self.stages.items():
            z, g, rest, total = (
                each / self.pixels for each in (peak.hidden_bytes, peak.gradient_bytes, peak.temporary_bytes, peak.total_bytes)
            )
            stage = f"{name}{' *' * (name == self.peak_stage)}"
            lines.append(f"{stage:<{longest}}  {z:>7.1f}  {g:>7.1f}  {rest:>11.1f}  {total:>7.1f}  {peak.phase} of {peak.unit}")
        return "\n".join(lines)


class PixelUnit(NamedTuple):
    """A module that is called, and the stage that it is in."""

    name: str
    module: nn.Module
    stage: str


class _Operation(NamedTuple):
    """An operation.

    Args:
        start: length of the log of bytes when it began.
        node: number of the node in whose backward it runs; None outside of one.
        makes_gradient: whether it reads a gradient.
    """

    start: int
    node: int | None
    makes_gradient: bool


class _Call(NamedTuple):
    """The call of a module: the unit it is in, and the numbers of its first operation and of its first node."""

    unit: PixelUnit
    operation: int
    node: int


class OperationLog(LiveBytes):
    """Logs operations and the bytes that they make.

    Args:
        units: modules in the model; of nested ones the inner follows. An operation belongs to the one last called, and so do
            its backward and what is rebuilt for that.
    """

    def __init__(self, units: Iterable[PixelUnit]) -> None:
        super().__init__()
        self._owners = {id(module): unit for unit in units for module in unit.module.modules()}
        self._operations: list[_Operation] = []
        self._readers: defaultdict[int, list[int]] = defaultdict(list)  # of each storage, rising
        self._gradients: dict[int, int | None] = {}  # storages that hold gradients, and the nodes that made them
        self._calls: list[_Call] = []
        self._backward_start = self._nodes = 0  # the number of operations and of nodes in forward

    def begin_call(self, module: nn.Module, *_: Any) -> None:
        """Note that a module is called, if it is in a unit."""
        if (unit := self._owners.get(id(module))) is not None:
            self._calls.append(_Call(unit, len(self._operations), torch._C._autograd._get_sequence_nr()))

    @contextmanager
    def hook_modules(self) -> Iterator[None]:
        """Note the calls of all modules in the units, but for layers that are called by another method than `forward`.

        The hook is a global one, because a layer with a hook of its own is not inverted.
        """
        with register_module_forward_pre_hook(self.begin_call):
            yield

    def begin_backward(self, loss: Tensor) -> Tensor:
        """Return the gradient of the loss, from which backward begins."""
        gradient = torch.ones_like(loss)
        self._gradients.update(dict.fromkeys(self.find(gradient)))
        self._backward_start, self._nodes = len(self._operations), torch._C._autograd._get_sequence_nr()
        return gradient

    def find_peaks(self, lasting: Storages) -> dict[str, Peak]:
        """Return the peak of every stage that was called, in order, without these storages."""
        highest: dict[str, tuple[int, int, int]] = {}  # bytes, position in the log of bytes, operation
        starts, units, total = [each.start for each in self._operations], self._list_units(), 0
        for position, (storage, change) in enumerate(self.log):
            if storage not in lasting:
                total += change
                operation = bisect_right(starts, position) - 1
                stage = units[operation].stage
                if total > highest.get(stage, (0,))[0]:
                    highest[stage] = total, position, operation
        called = dict.fromkeys(each.unit.stage for each in self._calls)
        places = {stage: highest[stage][1:] for stage in called if stage in highest}
        return {
            stage: self._split(units[operation].name, position, operation, lasting)
            for stage, (position, operation) in places.items()
        }

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Collection[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is DEVICE:
            return super().__torch_dispatch__(func, types, args, kwargs)
        start, read = self.now(), self.find((args, kwargs))
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if out is NotImplemented:
            return out
        made = self.find(out)
        if made <= read and not _is_mutable(func):
            return out  # a view, or a question about a shape or a device: no value is read
        node = torch._C._current_autograd_node()
        number = None if node is None else node._sequence_nr()
        makes_gradient = not read.isdisjoint(self._gradients)
        for storage in read:
            self._readers[storage].append(len(self._operations))
        self._operations.append(_Operation(start, number, makes_gradient))
        if makes_gradient:
            for storage in made:
                self._gradients.setdefault(storage, number)
        return out

    def _list_units(self) -> list[PixelUnit]:
        """Return the unit of every operation."""
        operations, nodes = [each.operation for each in self._calls], [each.node for each in self._calls]
        units, present = list[PixelUnit](), 0
        for i, operation in enumerate(self._operations):
            if i < self._backward_start:
                present = bisect_right(operations, i) - 1
            elif operation.node is not None and operation.node < self._nodes:  # else it adds up gradients of weights
                present = bisect_right(nodes, operation.node) - 1
            units.append(self._calls[max(present, 0)].unit)
        return units

    def _split(self, unit: str, position: int, operation: int, lasting: Storages) -> Peak:
        """Return the terms of what is alive after an entry of the log of bytes, which an operation has made."""
        alive: defaultdict[int, int] = defaultdict(int)
        for storage, change in self.log[: position + 1]:
            if storage not in lasting:
                alive[storage] += change
        terms: defaultdict[str, int] = defaultdict(int)
        for storage, size in alive.items():
            terms[self._find_term(storage, operation)] += size
        phase: PhaseName = "forward" if operation < self._backward_start else "backward"
        return Peak(unit, phase, terms["hidden"], terms["gradient"], terms["temporary"])

    def _find_term(self, storage: int, operation: int) -> str:
        readers = self._readers[storage]
        later = [(i, self._operations[i]) for i in readers[bisect_right(readers, operation - 1) :]]
        if storage in self._gradients:
            return "gradient" if any(each.node != self._gradients[storage] for _, each in later) else "temporary"
        node = self._operations[operation].node
        used = (each for i, each in later if i >= self._backward_start)
        return "hidden" if any(each.makes_gradient or each.node != node for each in used) else "temporary"


def _is_mutable(operation: Any) -> bool:
    """Return whether an operation writes to one of its inputs."""
    schema = getattr(operation, "_schema", None)
    return schema is None or bool(schema.is_mutable)


_BATCH_SIZE = 32


def bytes_per_pixel(model: nn.Module | str, batch: Tensor | None = None, *, loss: LossFunction | None = None) -> PixelReport:
    """Count what a training step needs for each pixel, under `FakeTensorMode`: nothing is allocated, and no image is needed.

    The model runs as it is now: its schedule, its training flag, and autocast if it is active. It is left as it was.

    Args:
        model: a name or YAML file as for `revzoo.create`, or any network for images.
        batch: images (B, C, H, W), also on the meta device; None is 32 images of the spec's size.
        loss: as for `revzoo.measure_memory`.
    Raises:
        InputError: a network for texts, a batch that is no batch of images, no batch for a network without a spec, nothing
            that requires a gradient, or a loss that is not one number.
    """
    if isinstance(model, str):
        model = create(model, device="meta")
    require_module(model)
    if batch is None:
        if not isinstance(model, Model):
            raise InputError(
                f"A {type(model).__name__} has no spec that says the size of its images. Give a batch of them, for example "
                "torch.empty(32, 3, 240, 240, device='meta')."
            )
        batch = model.example_input(_BATCH_SIZE, device="meta")
    if not (isinstance(batch, Tensor) and batch.dim() == 4 and batch.is_floating_point()):
        received = f"{tuple(batch.shape)}, {batch.dtype}" if isinstance(batch, Tensor) else type(batch).__name__
        raise InputError(
            f"Pixels are those of images (B, C, H, W) in floating point. Received: {received}. For other networks there is "
            "revzoo.measure_memory(model, batch)."
        )
    with isolated(model, batch, fake=True) as inputs:
        log, lasting = count_step(model, inputs, _list_stages(model), loss)
        weights = log.size(log.watch(model.parameters()))
    count, _, height, width = batch.shape
    return PixelReport(count, (height, width), weights, log.find_peaks(lasting), log.peak(without=lasting))


def count_step(
    model: nn.Module, batch: Any, units: Iterable[PixelUnit], loss: LossFunction | None = None
) -> tuple[OperationLog, Storages]:
    """Run a training step inside `isolated`; return its log, and what weights, buffers, batch and gradients are stored in."""
    replaced = any(map(is_replaced, model.modules()))
    log = _OperationLogOfReplacedCalls(units) if replaced else OperationLog(units)
    lasting = log.watch([*model.parameters(), *model.buffers(), batch])
    with log:
        with observe_calls(log.begin_call), log.hook_modules():
            outputs = call(model, batch)
        total = compute_loss(loss, outputs)
        del outputs
        with leave_autocast():
            total.backward(log.begin_backward(total))
    return log, lasting | log.watch(p.grad for p in model.parameters())


class _OperationLogOfReplacedCalls(LiveBytesOfReplacedCalls, OperationLog):
    """Logs operations of modules whose calls `replaced_call.py` replaces."""


def _list_stages(model: nn.Module) -> Iterator[PixelUnit]:
    """Yield the units of a model by stage; of another network itself, and its children, which are stages of their own."""
    if isinstance(model, Model):
        for entry in model.layout():
            stage = entry.name.partition(".")[0] if entry.stage is None else f"stages.{entry.stage}"
            yield PixelUnit(entry.name, entry.module, "stem" if stage == "split" else stage)
        return
    name = type(model).__name__
    yield PixelUnit(name, model, name)
    for name, child in model.named_children():
        if isinstance(child, nn.ModuleList):
            for index, module in child.named_children():
                yield PixelUnit(f"{name}.{index}", module, name)
        else:
            yield PixelUnit(name, child, name)
