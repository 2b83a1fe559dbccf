"""The smallest rows of states: what a grid has to resolve, beside the largest elements that it has to hold."""

import warnings
from typing import Any, cast

import torch
from torch import Tensor

from revzoo.device import has_value, is_capturing
from revzoo.sharded import is_sharded

LEAST_DIGITS = 5  # binary, of a row on the grid: rounding then changes it by at most a percent, about as 8 kept bits do


def measure_smallest_row(state: Tensor, of_images: bool = False) -> float:
    """Return the least root mean square of a row of a state that is not zero; infinity if there is none.

    A row has the channels of one token or pixel. They are last or, in images, perhaps second: there a row along another axis
    may be nearly zero by chance, so the axis with the larger rows counts.

    Args:
        of_images: whether an image is one row. One of its pixels may always be nearly zero.
    """
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
    if not has_value(state) or is_capturing() or state.numel() == 0:
        return smallest
    row = measure_smallest_row(cast(Any, state).to_local() if is_sharded(state) else state, of_images=smallest < torch.inf)
    if row < min(smallest / 2, 2.0**LEAST_DIGITS / scale):
        warnings.warn(
            f"{name} begins a chain, and a token or pixel that it is given has size {row:.2g}, of which a grid of "
            f"{1 / scale:.2g} leaves {'nothing' if row * scale < 0.5 else 'little'}: the network computes another "
            "function. Call revzoo.ordinary_(model), then reversible_ with a batch like this one (batch=), without "
            "fraction_bits: it chooses a grid that fits.",
            stacklevel=2,
        )
    return min(smallest, row)
