"""Keeping what is expensive to compute: the products of a call, between its first run and the next.

Matrix products, convolutions and attention are nearly all of a step's work, but only a part of what autograd saves in it:
norms, activations and dropout save their own inputs and outputs beside them. A call in mode `selective` keeps the products
that its second run will need and has everything else computed again.

As in PyTorch's selective checkpointing (`torch.utils.checkpoint.create_selective_checkpoint_contexts`), one dispatch mode
notes outputs and another hands them out. Two things differ: a product behind the last tensor that autograd saves is not
kept, because the second run ends before it (the last layer of nearly every branch; 10 instead of 12 streams for a block of a
transformer), and a further backward through a retained graph computes what the first one has used up.
"""

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import flop_registry

from revzoo.runtime.memory import tensors_in, wraps_tensors

_PRODUCTS = frozenset(flop_registry)  # what PyTorch counts FLOPs for


class Products:
    """The products of one call, by their number in it."""

    def __init__(self) -> None:
        self._outputs: dict[int, tuple[Any, Any, list[int]]] = {}  # operation, outputs, their versions
        self._made = self._needed = 0

    def keeping(self) -> TorchDispatchMode:
        """Return a mode for the first run, that keeps every product."""
        return _Mode(self._keep)

    def returning(self) -> TorchDispatchMode:
        """Return a mode for a further run, that hands out what is kept, each once, and has the rest computed."""
        self._made = 0
        return _Mode(self._give)

    def saved(self) -> None:
        """Note that autograd saved something just now: whatever was made before will be needed."""
        self._needed = self._made

    def trim(self) -> None:
        """Let go what is not needed."""
        for number in range(self._needed, self._made):
            del self._outputs[number]

    def _keep(self, func: Any, args: Any, kwargs: Any) -> Any:
        out = func(*args, **kwargs)
        kept = tree_map_only(Tensor, _alias, out)
        self._outputs[self._made] = func, kept, _versions(kept)
        self._made += 1
        return out

    def _give(self, func: Any, args: Any, kwargs: Any) -> Any:
        known, kept, versions = self._outputs.pop(self._made, (None, None, []))
        self._made += 1
        if known is func and _versions(kept) == versions:  # a product that was changed in place is computed again
            return kept
        return func(*args, **kwargs)


class _Mode(TorchDispatchMode):
    """Hand every product to `handle` and let everything else pass."""

    def __init__(self, handle: Callable[[Any, Any, Any], Any]):
        super().__init__()
        self._handle = handle

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """A compiled step stays compiled; what happens inside it is not seen."""
        return True

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Collection[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(wraps_tensors(t) for t in types):
            return NotImplemented  # the subclass runs first, and its inner operations come here
        if getattr(func, "_overloadpacket", None) in _PRODUCTS:
            return self._handle(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def _alias(tensor: Tensor) -> Tensor:
    """Return a tensor of the same storage and version counter, which autograd will not make part of the graph."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def _versions(outputs: Any) -> list[int]:
    return [t._version for t in tensors_in(outputs)]
