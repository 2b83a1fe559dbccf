"""The smallest rows of states: what a grid has to resolve, beside the largest elements that it has to hold."""

import warnings
from typing import Any, cast

import torch
from torch import Tensor

from revzoo.device import has_value, is_capturing
from revzoo.sharded import is_sharded

LEAST_DIGITS = 5  # binary, of a row on the grid: rounding then changes it by at most a percent, about as 8 kept bits do


def measure_smallest_row(state: Tensor) -> float:
    """Return the least root mean square of a row of a state that is not zero; infinity if there is none.

    A row has the channels of one token or pixel. They are last or, in images, perhaps second: there a row along another axis
    may be nearly zero by chance, so the axis with the larger rows counts.
    """
    squares = state.detach().float().square()
    sizes = [squares.mean(axis).sqrt() for axis in ((1, -1) if state.dim() > 3 else (-1,))]
    return max(float(torch.where(rows > 0, rows, torch.inf).amin()) for rows in sizes)


def warn_of_lost_rows(state: Tensor, scale: float, name: str) -> bool:
    """Warn if a grid is too coarse for a row of the first state of a chain; return whether it could be looked at.

    Args:
        state: before it is rounded.
        scale: of the grid, whose spacing is 1 / scale.
        name: of the step.
    """
    if not has_value(state) or is_capturing() or state.numel() == 0:
        return False
    smallest = measure_smallest_row(cast(Any, state).to_local() if is_sharded(state) else state)
    if 0 < smallest * scale < 2.0**LEAST_DIGITS:  # 0 where nothing was computed
        warnings.warn(
            f"{name} begins a chain, and a token or pixel that it is given has size {smallest:.2g}, of which a grid of "
            f"{1 / scale:.2g} leaves {'nothing' if smallest * scale < 0.5 else 'little'}: the network computes another "
            "function. Call revzoo.ordinary_(model), then reversible_ with a batch like this one (batch=), without "
            "fraction_bits: it chooses a grid that fits.",
            stacklevel=2,
        )
    return True
