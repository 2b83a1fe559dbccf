"""The place in a chain of a tensor that a block has returned. The network's own code gives the tensor to the next block."""

from dataclasses import dataclass, field
from threading import local
from typing import cast
from weakref import ref

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from revzoo.device import has_value
from revzoo.runtime.exact import Grid
from revzoo.runtime.round import Round
from revzoo.runtime.segment import InvertedSegment


@dataclass
class Position:
    """The place in a chain of a tensor that a block has returned: after which step.

    Args:
        chain: the chain, which is compared by identity.
        previous: w[k-1].
        current: w[k], if that is another tensor than the one returned.
        segment: the inverted steps that end here.
        grid: of the states; one for all, so that they are checked together.
        round: counts that second runs are compared; None if they are not.
    """

    chain: object
    previous: Tensor
    current: Tensor | None
    segment: InvertedSegment | None
    grid: Grid
    round: Round | None
    length: int = field(init=False)
    version: int = field(init=False)
    requires_grad: bool = field(init=False)

    def __post_init__(self) -> None:
        self.length = 0 if self.segment is None else self.segment.length


_positions: WeakIdKeyDictionary = WeakIdKeyDictionary()  # of the tensors that blocks have returned
_latest = local()  # in this thread: the tensor that a block returned last


def note_position(y: Tensor, position: Position) -> None:
    """Remember where a tensor stands, as long as it lives and is not changed."""
    if not torch.compiler.is_compiling():
        position.version = 0 if y.is_inference() else y._version
        position.requires_grad = y.requires_grad
        _positions[y] = position
        _latest.tensor = ref(y)


def is_noted(x: Tensor) -> bool:
    """Return whether a block has returned this very tensor."""
    return x in _positions


def find_position(x: Tensor, chain: object) -> Position | None:
    """Return where x stands in a chain; None for a tensor that no block of it has returned, or that has changed since."""
    if torch.compiler.is_compiling():
        return None
    position = _positions.get(x)
    if position is None and (returned := _find_wrapped(x)) is not None:
        position = _positions.get(returned)
    if position is None or position.chain is not chain or (not x.is_inference() and x._version != position.version):
        return None
    if x.requires_grad is not position.requires_grad:
        return None  # detached
    return cast(Position, position)


def _find_wrapped(x: Tensor) -> Tensor | None:
    """Return a block's latest tensor if x is that tensor with a node of the graph that FSDP has added, else None."""
    latest = getattr(_latest, "tensor", None)
    y: Tensor | None = None if latest is None else latest()
    if y is None or x.grad_fn is None or y.grad_fn is None or x.stride() != y.stride():
        return None
    if not has_value(x):
        is_same = x.untyped_storage()._cdata == y.untyped_storage()._cdata and x.storage_offset() == y.storage_offset()
    else:
        is_same = x.data_ptr() == y.data_ptr()
    if not is_same:
        return None
    return y if any(node is y.grad_fn for node, _ in x.grad_fn.next_functions) and x.shape == y.shape else None
