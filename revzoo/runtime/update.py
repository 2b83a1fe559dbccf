"""How one step, bijection or layer changes the states, and how that is undone.

Kernels choose the order of their sums by strides, so rebuilt states have those of the states in forward.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from revzoo.bijection import Bijection
from revzoo.dtype import match_dtype
from revzoo.invertible import add, subtract
from revzoo.runtime.coupling import Coupling, Pair
from revzoo.runtime.mode import Mode
from revzoo.runtime.nested import wraps_tensors
from revzoo.runtime.ownership import is_held_alone
from revzoo.runtime.tiles import Tiles, find_tiles

States = tuple[Tensor, ...]  # a pair between steps, one tensor between layers
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
    """One step of a chain: its function, and its coupling and mode in this forward call.

    Args:
        is_whole: whether it is run whole, though it may be marked to be cut.
    """

    f: Callable[..., Tensor]
    name: str
    coupling: Coupling
    mode: Mode
    is_whole: bool = False

    @property
    def tiles(self) -> Tiles | None:
        """Into what it is cut; None if it is run whole."""
        return None if self.is_whole else find_tiles(self.f)


def make_step(f: Callable[..., Tensor], name: str, coupling: Coupling, mode: Mode, training: bool) -> Step:
    """Return a step of a network in training or evaluation: where the coupling is another one there, it is stored.

    In evaluation without gradients it is whole. In training a checkpoint around the chain may run it first without and then
    with them, and both must draw alike.
    """
    is_other = not training and coupling.in_evaluation is not coupling
    is_whole = not (training or torch.is_grad_enabled())
    if is_other:
        return Step(f, name, coupling.in_evaluation, Mode.STORE, is_whole)
    return Step(f, name, coupling, mode, is_whole)


class Update:
    """How one step, bijection or layer changes the states, and how to undo that."""

    b = 1.0  # each inversion multiplies errors by 1 / |b|
    growth: float | Tensor = 1.0  # and relative ones by this, as predicted
    inverts_first = False  # whether `invert` gives the input of f without its output, so that f runs after it
    rebuilds = True  # whether `invert` rebuilds a state, or a tile of one

    def find_input(self, states: States, *, is_after: bool) -> Tensor:
        """Return the input of f among the states before it, or after it."""
        return states[0 if is_after else 1]

    def find_rebuilt(self, states: States) -> Tensor:
        """Return what `invert` has rebuilt of the states before it."""
        return states[0]

    @property
    def lost_bits(self) -> Sequence[Tensor]:
        """What `invert` uses up besides the states."""
        return ()

    # Any: one update knows pairs, another single tensors, and only steps know `out`.
    def advance(self, states: Any, out: Any) -> Any:
        """Return the states after it."""
        raise NotImplementedError

    def invert(self, states: Any, out: Any) -> Any:
        """Return the states before it."""
        raise NotImplementedError


class StepUpdate(Update):
    """A step of two streams; on the grid if arithmetic is exact.

    Args:
        coupling: of the step.
        grid: the grid of this forward call, None in floating point.
        previous: w[k-1]; None if `advance` keeps nothing for `invert`.
        will_be_undone: whether `advance` keeps the bits that the coupling loses.
    """

    def __init__(self, coupling: Coupling, grid: Any, previous: Tensor | None = None, will_be_undone: bool = False):
        self._coupling = coupling
        self._grid = grid
        self.b = coupling.b
        self.will_be_undone = will_be_undone
        self._strides = get_strides(previous) if will_be_undone and previous is not None else None
        self._lost_bits: Any = None

    @property
    def lost_bits(self) -> Sequence[Tensor]:
        bits, sign = self._lost_bits, self._coupling.sign
        fields = () if bits is None else (bits,) if isinstance(bits, Tensor) else bits.fields
        return fields if sign is None else (*fields, sign)

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
        elif not (torch.compiler.is_compiling() or wraps_tensors(type(following))):  # DTensors may be sharded differently
            into = following.new_empty_strided(following.shape, strides)
        if self._grid is None:
            rebuilt = self._coupling.invert(following, current, match_dtype(out, following), into)
        else:
            bits, self._lost_bits = self._lost_bits, None
            rebuilt = self._grid.invert(self._coupling, following, current, out, bits, into)
        return restore_strides(rebuilt, strides), current


class BijectionUpdate(Update):
    """A bijection of the only state, or of the first of two. What it returns is then the last.

    Args:
        bijection: the bijection.
        x: the state before it, whose strides `invert` restores; None if it will not be undone.
    """

    def __init__(self, bijection: Bijection, x: Tensor | None = None):
        self._bijection = bijection
        self._strides = None if x is None else get_strides(x)

    def advance(self, states: States, out: None) -> States:
        return *states[1:], self._bijection(states[0])

    def invert(self, states: States, out: None) -> States:
        return restore_strides(self._bijection.inverse(states[-1]), self._strides), *states[:-1]


class RegroupUpdate(Update):
    """The states are taken apart, or put together.

    Args:
        regroup: returns the states after it.
        undo: returns those before it.
        x: the state before it, if that is one.
    """

    def __init__(self, regroup: Callable[..., States], undo: Callable[..., States], x: Tensor | None = None):
        self._regroup, self._undo = regroup, undo
        self._strides = None if x is None else get_strides(x)

    def advance(self, states: States, out: None) -> States:
        return self._regroup(*states)

    def invert(self, states: States, out: None) -> States:
        return tuple([restore_strides(x, self._strides) for x in self._undo(*states)])


class LayerUpdate(Update):
    """A layer on the only state, or on the first of two. What it returns is then the last.

    Args:
        invert: the layer's inverse, called with its output and the shape of its input.
        x: the state before it.
        growth: how much the inverse is predicted to multiply relative errors.
    """

    inverts_first = True

    def find_input(self, states: States, *, is_after: bool) -> Tensor:
        return states[0]

    def __init__(self, invert: Callable[[Tensor, torch.Size], Tensor], x: Tensor, growth: float | Tensor):
        self._invert = invert
        self.growth = growth
        self._shape, self._strides = x.shape, get_strides(x)

    def advance(self, states: States, out: Tensor) -> States:
        return *states[1:], out

    def invert(self, states: States, out: None) -> States:
        return restore_strides(self._invert(states[-1], self._shape), self._strides), *states[:-1]


class AdditionUpdate(Update):
    """f of the second half is added to the first half, and then the halves change places."""

    def __init__(self, x: Tensor):
        self._strides = get_strides(x)

    def advance(self, states: States, out: Tensor) -> States:
        return states[1], add(states[0], out)

    def invert(self, states: States, out: Tensor) -> States:
        y = states[1]
        return restore_strides(subtract(y, out, in_place=is_held_alone(y)), self._strides), states[0]
