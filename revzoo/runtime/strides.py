"""Strides of rebuilt states: kernels choose the order of their sums by them, so they are those of the state in forward."""

import torch
from torch import Tensor

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
