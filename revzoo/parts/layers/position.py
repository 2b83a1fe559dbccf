"""Learned embeddings of the positions of tokens, and how they are interpolated to another grid."""

import warnings
from collections.abc import Sequence
from math import isqrt

import torch
import torch.nn.functional as F
from timm.layers import resize_rel_pos_bias_table
from torch import Tensor, nn

from revzoo.parts.context import Shape


def build_position_embedding(tokens: Shape, std: float) -> nn.Parameter:
    """Return one embedding for each token, (1, N, D), drawn from a normal distribution truncated at +-2."""
    embedding = nn.Parameter(torch.empty(1, *tokens.dims))
    nn.init.trunc_normal_(embedding, std=std)
    return embedding


def resize_distances(tensor: Tensor, shape: Sequence[int]) -> Tensor | None:
    """Return embeddings of relative positions, (2 N - 1, D), interpolated linearly to `shape`, or None if D differs."""
    if tensor.ndim != 2 or len(shape) != 2 or tensor.shape[1] != shape[1]:
        return None
    return F.interpolate(tensor.float().T[None], size=shape[0], mode="linear")[0].T.to(tensor.dtype).contiguous()


def resize_biases(tensor: Tensor, shape: Sequence[int]) -> Tensor | None:
    """Return the position biases of a window, ((2 K - 1)^2, M), interpolated as timm does; None if a window is not square."""
    if tensor.ndim != 2 or tensor.shape[1] != shape[1]:
        return None
    sides = isqrt(len(tensor)), isqrt(shape[0])
    if (sides[0] ** 2, sides[1] ** 2) != (len(tensor), shape[0]) or not sides[0] % 2 or not sides[1] % 2:
        return None
    with warnings.catch_warnings():  # torch warns, once, that timm calls it with strided numbers
        warnings.simplefilter("ignore")
        resampled: Tensor = resize_rel_pos_bias_table(tensor, ((sides[1] + 1) // 2,) * 2, tuple(shape))
    return resampled
