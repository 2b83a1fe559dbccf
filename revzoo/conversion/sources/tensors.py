"""Changes to tensors that several sources need: one matrix of queries, keys and values; counts; positions of another grid."""

import re
from collections.abc import Mapping, Sequence
from math import isqrt

import torch
from timm.layers import resample_abs_pos_embed
from torch import Tensor

GridSize = tuple[int, int]  # rows and columns of tokens

_QUERY = re.compile(r"(^|\.)q(_proj)?(?=\.[^.]*$)")  # the module in a key
_MEAN = re.compile(r"\b(running|ema)_mean$")


def merge_qkv(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """Return the tensors with each X.q, X.k and X.v stacked as X.qkv, as timm has it, and a note on it.

    A set stays as it is if one of the three is missing (such as biases of q and v alone), or X.qkv is there already.

    Args:
        tensors: a state dict; X.q_proj, X.k_proj and X.v_proj are stacked as well.
    """
    result, count = dict(tensors), 0
    for key in tensors:
        names = [_QUERY.sub(rf"\1{name}\2", key) for name in "qkv"]
        merged = _QUERY.sub(r"\1qkv", key)
        if len({*names}) == 3 and all(name in tensors for name in names) and merged not in tensors:
            result[merged] = torch.cat([result.pop(name) for name in names])
            count += 1
    if not count:
        return result, []
    return result, [f"{3 * count} tensors of separate queries, keys and values were merged into {count} (qkv)"]


def add_batch_counts(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """Return the tensors with 0 for the counts of batches that BatchNorm did not have before PyTorch 0.4.1, and a note."""
    counts = [_MEAN.sub("num_batches_tracked", key) for key in tensors if _MEAN.search(key)]
    absent = {key: torch.tensor(0) for key in counts if key not in tensors}
    notes = [f"{len(absent)} counts of batches (num_batches_tracked) are not in the file and were set to 0"]
    return {**tensors, **absent}, notes if absent else []


def resize_positions(tensor: Tensor, shape: Sequence[int], prefix: int = 0, grid: GridSize | None = None) -> Tensor | None:
    """Return position embeddings of a square grid interpolated to another grid as timm does, or None if they are of no such.

    Args:
        tensor: (1, prefix + N, D).
        shape: the shape of the result, (1, prefix + M, D).
        prefix: number of first rows that belong to no position in the grid; they are kept.
        grid: the grid of the M positions; None: it is square.
    """
    if tensor.ndim != 3 or len(shape) != 3 or tensor.shape[::2] != tuple(shape)[::2]:
        return None
    old, new = tensor.shape[1] - prefix, shape[1] - prefix
    if min(old, new) < 1:
        return None
    grid = grid or (isqrt(new), isqrt(new))
    if isqrt(old) ** 2 != old or grid[0] * grid[1] != new:
        return None
    return resample_abs_pos_embed(tensor, list(grid), [isqrt(old)] * 2, prefix)
