"""The grid of a chain's states: it has to resolve their smallest rows, and to hold their largest elements.

A row has the channels of one token or pixel.
"""

import math
import warnings
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from revzoo.device import has_value, is_capturing, is_sharded
from revzoo.runtime.exact import GRIDS

FRACTION_BITS = (4, 40)  # the fewest and the most
_ROOM = 4  # binary digits that states may grow by in training
_DIGITS = 13  # binary, of the smallest row, where there is room
_LEAST_DIGITS = 5  # rounding then changes a row by at most a percent, about as 8 kept bits do


class StateGrid(NamedTuple):
    """The grid of a chain's states.

    Args:
        states: their dtype; None for the usual one.
        fraction_bits: binary digits after the point; None for as many as usual.
        smallest_row: root mean square of the smallest row that was seen.
    """

    states: torch.dtype | None = None
    fraction_bits: int | None = None
    smallest_row: float = math.inf


@dataclass
class StateSizes:
    """How large states are.

    Args:
        largest: magnitude of an element.
        smallest: root mean square of a row that is not zero.
    """

    largest: float = 0.0
    smallest: float = math.inf

    def add(self, state: Tensor) -> None:
        """Consider a state."""
        self.smallest = min(self.smallest, _measure_smallest_row(state))
        self.largest = max(self.largest, float(state.detach().abs().amax()) if state.numel() else 0.0)

    def __or__(self, other: "StateSizes") -> "StateSizes":
        return StateSizes(max(self.largest, other.largest), min(self.smallest, other.smallest))


def choose_grid(evaluation: StateSizes, training: StateSizes, dtype: torch.dtype, has_float64: bool) -> tuple[StateGrid, str]:
    """Return a grid that resolves the smallest row of states and holds the largest element, with room; and what to say of it.

    In eval mode, a network whose BatchNorms have no statistics yet has much smaller states than in training: the grid holds
    both. Where 24 digits are too few for the smallest row in training, states are float64. That costs four more bytes for each
    element of two states, which is less than a block that stays ordinary.

    Args:
        evaluation: of the states in eval mode.
        training: of those in training mode; none for a network that is not trained.
        dtype: of the usual states.
        has_float64: whether they may be float64.
    """
    sizes = evaluation | training
    bits = _count_fraction_bits(sizes, dtype)
    resolved = 2.0 ** (_LEAST_DIGITS - bits)
    smallest = (training if training.largest else sizes).smallest
    words = f"tokens or pixels of {sizes.smallest:.2g} beside elements of {sizes.largest:.2g}"
    if smallest < resolved and dtype is not torch.float64 and has_float64:
        grid = StateGrid(torch.float64, _count_fraction_bits(sizes, torch.float64), sizes.smallest)
        return grid, f"states are float64, because the 24 binary digits of float32 do not hold {words}"
    note = f"the grid is too coarse for {words}" if sizes.smallest < resolved else ""
    in_eval = " in eval mode; in training mode they are larger, as before BatchNorms have statistics"
    return StateGrid(None, bits, sizes.smallest), note and note + (in_eval if smallest >= resolved else "")


def _count_fraction_bits(sizes: StateSizes, dtype: torch.dtype) -> int:
    usual, digits = GRIDS[dtype]
    if not (sizes.largest and math.isfinite(sizes.largest) and math.isfinite(sizes.smallest)):
        return usual
    wanted = max(usual, _DIGITS - math.floor(math.log2(sizes.smallest)))
    bits = min(wanted, digits - _ROOM - math.ceil(math.log2(sizes.largest)))
    return max(FRACTION_BITS[0], min(bits, FRACTION_BITS[1]))


def _measure_smallest_row(state: Tensor, of_images: bool = False) -> float:
    """Return the least root mean square of a row of a state that is not zero; infinity if there is none.

    Channels are last or, in images, perhaps second: there a row along another axis may be nearly zero by chance, so the axis
    with the larger rows counts.

    Args:
        of_images: whether an image is one row. One of its pixels may always be nearly zero.
    """
    if not state.numel():
        return math.inf
    axes: list[Any] = [-1] if state.dim() < 4 else [tuple(range(1, state.dim()))] if of_images else [1, -1]
    dtype = torch.promote_types(state.dtype, torch.float32)
    norms = (torch.linalg.vector_norm(state.detach(), dim=axis, dtype=dtype) for axis in axes)
    sizes = (rows * (rows.numel() / state.numel()) ** 0.5 for rows in norms)
    return max(float(torch.where(rows > 0, rows, torch.inf).amin()) for rows in sizes)


def warn_of_lost_rows(state: Tensor, scale: float, smallest: float, name: str) -> float:
    """Warn if a grid is too coarse for a row of the first state of a chain; return the size of the smallest row now known.

    Args:
        state: before it is rounded.
        scale: of the grid, whose spacing is 1 / scale.
        smallest: row that is known; only much smaller ones are warned of. Infinity before the first.
        name: of the step.
    """
    if not has_value(state) or is_capturing():
        return smallest
    state = cast(Any, state).to_local() if is_sharded(state) else state.values() if state.is_nested else state
    row = _measure_smallest_row(state, of_images=smallest < math.inf)
    if 0 < row < min(smallest / 2, 2.0**_LEAST_DIGITS / scale):  # 0 where nothing was computed
        warnings.warn(
            f"{name} begins a chain, and a token, pixel or image that it is given has size {row:.2g}, of which a grid of "
            f"{1 / scale:.2g} leaves {'nothing' if row * scale < 0.5 else 'little'}: the network computes another "
            "function. Call revzoo.ordinary_(model), then reversible_ with a batch like this one (batch=), without "
            "fraction_bits: it chooses a grid that fits.",
            stacklevel=2,
        )
    return min(smallest, row)
