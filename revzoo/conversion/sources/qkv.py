"""Queries, keys and values of an attention as one matrix, where a file has three."""

from collections.abc import Mapping

import torch
from torch import Tensor

_NAMES = (("q", "k", "v"), ("q_proj", "k_proj", "v_proj"))


def fused(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """Return the tensors with each X.q, X.k, X.v stacked as X.qkv, as timm has it, and what was done in words.

    A set that is incomplete, such as biases of q and v alone, whose widths differ, or that is fused already stays as it is.

    Args:
        tensors: a state dict; X.q_proj, X.k_proj, X.v_proj are understood as well.
    """
    result, count = dict(tensors), 0
    for key in tensors:
        owner, _, leaf = key.rpartition(".")
        parent, _, name = owner.rpartition(".")
        names = next((names for names in _NAMES if name == names[0]), None)
        if names is None:
            continue
        prefix = f"{parent}." if parent else ""
        keys, goal = [f"{prefix}{part}.{leaf}" for part in names], f"{prefix}qkv.{leaf}"
        if goal in tensors or not all(part in tensors for part in keys):
            continue
        parts = [tensors[part] for part in keys]
        if len({part.shape[1:] for part in parts}) > 1 or parts[0].ndim == 0:
            continue
        for part in keys:
            del result[part]
        result[goal] = torch.cat(parts)
        count += 1
    if not count:
        return result, []
    return result, [f"{3 * count} tensors of separate queries, keys and values were merged into {count} (qkv)"]
