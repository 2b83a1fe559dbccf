"""Keeping what is expensive to compute: the products of a call, between its first run and the next.

Matrix products, convolutions and attention are nearly all of a step's work, but only a part of what autograd saves in it:
norms, activations and dropout save their own inputs and outputs beside them. A call in mode `selective` keeps the products
that what it dropped was made from, and has everything else computed again.

As in PyTorch's selective checkpointing (`torch.utils.checkpoint.create_selective_checkpoint_contexts`), one dispatch mode
notes outputs and another hands them out. Two things differ. Every storage knows the products that its contents were made
from, so a product behind which autograd saves nothing (the last layer of nearly every branch, the convolution of a shortcut)
is not kept, and zeros stand in for it in the second run: 10 instead of 12 streams for a block of a transformer. And a further
backward through a retained graph computes everything anew.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import flop_registry

from revzoo.errors import RecoveryError
from revzoo.runtime.live_bytes import wraps_tensors
from revzoo.runtime.nested import tensors_in

_PRODUCTS = frozenset(flop_registry)  # what PyTorch counts FLOPs for

Number = tuple[Any, int]  # an operation, and the how manieth of its calls
_NONE = frozenset[Number]()
_DECIDING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}  # what is computed next


class Products:
    """The products of one call.

    Args:
        name: of the call, for messages.
    """

    def __init__(self, name: str):
        self._name = name
        self._outputs: dict[Number, tuple[Any, list[int]]] = {}  # with their versions
        self._unneeded: dict[Number, Any] = {}  # what their outputs look like
        self._calls: Counter[Any] = Counter()
        self._runs = 0
        # During the first run:
        self._sources: dict[int, frozenset[Number]] = {}  # products that the contents of a storage were made from
        self._inputs: dict[Number, frozenset[Number]] = {}  # and those that each product was made from
        self._joins: list[Number] = []  # operations that are no products, on several of them
        self._needed: set[Number] = set()
        self._homes: dict[int, list[Number]] = defaultdict(list)  # what is kept in a storage
        self._changed: set[Number] = set()  # what was changed in place, which not every version counter sees

    def keeping(self) -> TorchDispatchMode:
        """Return a mode for the first run, that keeps every product."""
        return _Mode(self._keep)

    def returning(self) -> TorchDispatchMode:
        """Return a mode for a further run; the first of these is handed what is kept."""
        self._calls.clear()
        self._runs += 1
        return _Mode(self._give)

    def saved(self, tensor: Tensor) -> None:
        """Note that autograd saved a tensor: what it was made from is needed."""
        self._needed |= self._sources.get(_key(tensor), _NONE)

    def trim(self) -> None:
        """Let go what is not needed, and what is made again of what is."""
        self._needed &= self._outputs.keys()
        waiting = list(self._needed)
        while waiting:
            number = waiting.pop()
            if number in self._changed:
                waiting += self._inputs[number] - self._needed
                self._needed |= self._inputs[number]
        for number in self._joins:
            if number in self._needed and self._inputs[number] <= self._needed:
                del self._outputs[number]
        for number, (kept, _) in list(self._outputs.items()):
            if number not in self._needed:
                self._unneeded[number] = tree_map_only(Tensor, _Blank, kept)
            if number not in self._needed or number in self._changed:
                del self._outputs[number]
        self._sources.clear()
        self._inputs.clear()
        self._homes.clear()

    def _keep(self, func: Any, args: Any, kwargs: Any) -> Any:
        if not isinstance(func, torch._ops.OpOverload):
            return func(*args, **kwargs)
        number = self._number(func)
        given = list(tensors_in((args, kwargs)))
        sources = _NONE.union(*(self._sources.get(_key(t), _NONE) for t in given))
        out = func(*args, **kwargs)
        made = list(tensors_in(out))
        changed = [t for argument, value in _arguments(func, args, kwargs) if _is_written(argument) for t in tensors_in(value)]
        for t in changed:
            self._changed.update(self._homes[_key(t)])
        product = _is_product(func)
        if (product or (len(sources) > 1 and made and not changed)) and not _draws(func, args, kwargs):
            kept = tree_map_only(Tensor, _alias, out)
            self._outputs[number] = kept, _versions(kept)
            self._inputs[number] = sources
            for t in tensors_in(kept):
                self._homes[_key(t)].append(number)
            if not product:
                self._joins.append(number)
            sources = frozenset([number])
        if not _DECIDING.isdisjoint(func.tags):
            self._needed |= sources
        for t in (*made, *changed):
            self._sources[_key(t)] = sources
        return out

    def _give(self, func: Any, args: Any, kwargs: Any) -> Any:
        number = self._number(func)
        if self._runs > 1 or (number not in self._unneeded and number not in self._outputs):
            return func(*args, **kwargs)
        if number in self._unneeded:
            return tree_map_only(_Blank, _Blank.zeros, self._unneeded[number])
        kept, versions = self._outputs.pop(number)
        if _versions(kept) != versions:
            raise RecoveryError(
                f"A product that {self._name} keeps was modified in place after forward. Replace the in-place operation, or "
                f"set the schedule of {self._name} to 'recompute' or 'store'."
            )
        return kept

    def _number(self, func: Any) -> Number:
        self._calls[func] += 1
        return func, self._calls[func]


class _Mode(TorchDispatchMode):
    """Hand every operation to `handle`."""

    def __init__(self, handle: Callable[[Any, Any, Any], Any]):
        super().__init__()
        self._handle = handle

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Collection[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(wraps_tensors(t) for t in types):
            return NotImplemented  # the subclass runs first, and its inner operations come here
        return self._handle(func, args, kwargs or {})


class _Blank:
    """What is left of a tensor whose contents nobody needs."""

    def __init__(self, tensor: Tensor):
        self._layout = tensor.size(), tensor.stride(), tensor.dtype, tensor.device

    def zeros(self) -> Tensor:
        """Return zeros in its place."""
        size, stride, dtype, device = self._layout
        return torch.empty_strided(size, stride, dtype=dtype, device=device).zero_()


def _is_product(func: Any) -> bool:
    return getattr(func, "_overloadpacket", None) in _PRODUCTS


def _draws(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether an operation moves the random stream, as attention with dropout does: it has to do so every time."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    given = {argument.name: value for argument, value in _arguments(func, args, kwargs)}
    return bool(given.get("dropout_p", 1))


def _arguments(func: Any, args: Any, kwargs: Any) -> Iterator[tuple[Any, Any]]:
    """Yield what an operation's schema says of each argument, and its value."""
    for i, argument in enumerate(func._schema.arguments):
        yield argument, args[i] if i < len(args) else kwargs.get(argument.name, argument.default_value)


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _key(tensor: Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata
    return key


def _alias(tensor: Tensor) -> Tensor:
    """Return a tensor of the same storage and version counter, which autograd will not make part of the graph."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def _versions(outputs: Any) -> list[int]:
    return [t._version for t in tensors_in(outputs)]
