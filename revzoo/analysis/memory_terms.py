"""Split the memory of a training step into hidden activations z, their gradients g, and temporaries.

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
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from revzoo.analysis.report import Peak, PhaseName
from revzoo.runtime.live_bytes import DEVICE, LiveBytes, Storages


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
