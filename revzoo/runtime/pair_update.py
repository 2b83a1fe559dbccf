"""How one step or bijection of a chain changes the pair of states, and how that is undone.

Kernels choose the order of their sums by strides, so rebuilt states have those of the states in forward.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from revzoo.bijection import Bijection
from revzoo.dtype import match_dtype
from revzoo.runtime.coupling import Coupling, Pair
from revzoo.runtime.mode import Mode
from revzoo.runtime.nested import wraps_tensors

Strides = tuple[int, ...] | None


def is_dense(x: Tensor) -> bool:
    """Return whether x has neither gaps nor overlaps in memory."""
    if x.is_contiguous():
        return True
    expected = 1
    for dim in sorted((dim for dim in range(x.dim()) if x.shape[dim] > 1), key=x.stride):
        if x.stride(dim) != expected:
            return False
        expected *= x.shape[dim]
    return True


def get_strides(x: Tensor) -> Strides:
    """Return the strides that a rebuilt x must have; None for a layout without strides, or with gaps or overlaps."""
    if x.layout is not torch.strided:
        return None
    return x.stride() if x.is_contiguous() or is_dense(x) else None


def restore_strides(x: Tensor, strides: Strides) -> Tensor:
    """Return x with these strides, copied if it has others."""
    return x if strides is None or x.stride() == strides else x.new_empty_strided(x.shape, strides).copy_(x)


@dataclass(frozen=True)
class Step:
    """One step of a chain: its function, and its coupling and mode in this forward call."""

    f: Callable[..., Tensor]
    name: str
    coupling: Coupling
    mode: Mode


class StepUpdate:
    """How one step updates the pair of states, and how to undo that; on the grid if arithmetic is exact.

    Kernels choose the order of their sums by strides, so a rebuilt state needs those of the state in forward, whatever the
    strides of f's output are.

    Args:
        coupling: of the step.
        grid: the grid of this forward call, None in floating point.
        previous: w[k-1]; None if `advance` keeps nothing for `invert`.
        will_be_undone: whether `advance` keeps the bits that the coupling loses.
    """

    __slots__ = ("_coupling", "_grid", "_lost_bits", "_strides", "b", "will_be_undone")

    inverts_first = False
    reads = 1
    growth = 1.0

    def __init__(self, coupling: Coupling, grid: Any, previous: Tensor | None = None, will_be_undone: bool = False):
        self._coupling = coupling
        self._grid = grid
        self.b = coupling.b
        self.will_be_undone = will_be_undone
        self._strides = get_strides(previous) if will_be_undone and previous is not None else None
        self._lost_bits: Any = None

    @property
    def lost_bits(self) -> Sequence[Tensor]:
        """The bits that the next `invert` uses up."""
        bits = self._lost_bits
        return () if bits is None else (bits,) if isinstance(bits, Tensor) else bits.fields

    def advance(self, pair: Pair, out: Tensor) -> Pair:
        if self._grid is None:
            return pair[1], self._coupling.advance(*pair, match_dtype(out, pair[0]))
        following, self._lost_bits = self._grid.advance(self._coupling, *pair, out, keeps_bits=self.will_be_undone)
        return pair[1], following

    def invert(self, pair: Pair, out: Tensor) -> Pair:
        strides, following, current = self._strides, pair[1], pair[0]
        into = None
        if strides is None or following.stride() == strides == out.stride():
            pass  # the difference has them too
        elif not wraps_tensors(type(following)):  # the operands of DTensors may be sharded differently
            into = following.new_empty_strided(following.shape, strides)
        if self._grid is None:
            rebuilt = self._coupling.invert(following, current, match_dtype(out, following), into)
        else:
            bits, self._lost_bits = self._lost_bits, None
            rebuilt = self._grid.invert(self._coupling, following, current, out, bits, into)
        return restore_strides(rebuilt, strides), current


class BijectionUpdate:
    """How a bijection changes both states of a pair, and how to undo that.

    Args:
        bijection: the bijection.
        will_be_undone: whether `advance` keeps the strides that `invert` restores.
    """

    inverts_first = False
    reads = 1
    growth = b = 1.0
    lost_bits: Sequence[Tensor] = ()

    def __init__(self, bijection: Bijection, will_be_undone: bool = False):
        self._bijection = bijection
        self._will_invert = will_be_undone
        self._strides: tuple[Strides, Strides] = (None, None)

    def advance(self, pair: Pair, out: None) -> Pair:
        if self._will_invert:
            self._strides = get_strides(pair[0]), get_strides(pair[1])
        return self._bijection(pair[0]), self._bijection(pair[1])

    def invert(self, pair: Pair, out: None) -> Pair:
        x1, x2 = (self._bijection.inverse(y) for y in pair)
        return restore_strides(x1, self._strides[0]), restore_strides(x2, self._strides[1])
