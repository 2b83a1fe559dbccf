"""How one step or bijection of a chain changes the pair of states, and how that is undone."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from revzoo.bijection import Bijection
from revzoo.invertible import match_dtype
from revzoo.runtime.coupling import Coupling, Pair
from revzoo.runtime.exact import Grid, LostBits
from revzoo.runtime.live_bytes import wraps_tensors
from revzoo.runtime.schedule import Mode
from revzoo.runtime.strides import Strides, get_strides, restore_strides


@dataclass(frozen=True)
class Step:
    """One step of a chain: its function, and its coupling and mode in this forward call."""

    f: Callable[..., Tensor]
    name: str
    coupling: Coupling
    mode: Mode


class PairUpdate:
    """How one step or bijection updates the pair of states, and how to undo that; on the grid if arithmetic is exact.

    Kernels choose the order of their sums by strides, so a rebuilt state needs those of the state in forward, whatever the
    strides of f's output are.

    Args:
        link: the step or bijection.
        grid: the grid of this forward call, None in floating point.
        will_invert: whether `advance` keeps what the next `invert` needs: the strides of the states, and the bits that the
            coupling loses.
    """

    def __init__(self, link: Step | Bijection, grid: Grid | None, will_invert: bool = False):
        self._link = link
        self._grid = grid
        self.b = 1.0 if isinstance(link, Bijection) else link.coupling.b
        self.inverts_first = False
        self.reads = 1
        self.growth = 1.0
        self.will_invert = will_invert
        self._strides: Sequence[Strides] = (None, None)  # of the states in front that inversion rebuilds: for a step, one
        self._lost_bits: LostBits = None

    @property
    def kept_bits(self) -> Sequence[Tensor]:
        """The bits that the next `invert` uses up."""
        bits = self._lost_bits
        return () if bits is None else (bits,) if isinstance(bits, Tensor) else bits.fields

    def advance(self, pair: Pair, out: Tensor | None) -> Pair:
        link = self._link
        if isinstance(link, Bijection):
            if self.will_invert:
                self._strides = get_strides(pair[0]), get_strides(pair[1])
            return link(pair[0]), link(pair[1])
        assert out is not None
        if self.will_invert:
            self._strides = (get_strides(pair[0]),)
        if self._grid is None:
            return pair[1], link.coupling.advance(*pair, match_dtype(out, pair[0]))
        following, self._lost_bits = self._grid.advance(link.coupling, *pair, out, keeps_bits=self.will_invert)
        return pair[1], following

    def invert(self, pair: Pair, out: Tensor | None) -> Pair:
        link, strides = self._link, self._strides[0]
        if isinstance(link, Bijection):
            x1, x2 = (link.inverse(y) for y in pair)
            return restore_strides(x1, strides), restore_strides(x2, self._strides[1])
        assert out is not None
        following, current = pair[1], pair[0]
        into = None
        if strides is None or following.stride() == strides == out.stride():
            pass  # the difference has them too
        elif not wraps_tensors(type(following)):  # the operands of DTensors may be sharded differently
            into = following.new_empty_strided(following.shape, strides)
        if self._grid is None:
            rebuilt = link.coupling.invert(following, current, match_dtype(out, following), into)
        else:
            bits, self._lost_bits = self._lost_bits, None
            rebuilt = self._grid.invert(link.coupling, following, current, out, bits, into)
        return restore_strides(rebuilt, strides), current
