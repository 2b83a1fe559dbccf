"""Tensors of another resolution, interpolated as timm does."""

from collections.abc import Sequence
from math import isqrt

import torch.nn.functional as F
from timm.layers import resample_abs_pos_embed
from torch import Tensor


def positions(tensor: Tensor, shape: Sequence[int], prefix: int = 0) -> Tensor | None:
    """Return embeddings of the positions of another square grid, or None where these are none.

    Args:
        tensor: (1, prefix + N, D).
        shape: what it is to have.
        prefix: rows in front that are of no position in the grid.
    """
    if tensor.ndim != 3 or len(shape) != 3 or tensor.shape[::2] != tuple(shape)[::2]:
        return None
    old, new = tensor.shape[1] - prefix, shape[1] - prefix
    if min(old, new) < 1 or isqrt(old) ** 2 != old or isqrt(new) ** 2 != new:
        return None
    found: Tensor = resample_abs_pos_embed(tensor, [isqrt(new)] * 2, [isqrt(old)] * 2, prefix)
    return found


def distances(tensor: Tensor, shape: Sequence[int]) -> Tensor | None:
    """Return embeddings of distances, (2 N - 1, D), interpolated linearly to another number of them, or None."""
    if tensor.ndim != 2 or len(shape) != 2 or tensor.shape[1] != shape[1]:
        return None
    return F.interpolate(tensor.float().T[None], size=shape[0], mode="linear")[0].T.to(tensor.dtype).contiguous()
