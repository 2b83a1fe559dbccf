"""Clip the gradients of a divided network, whose parameters may be divided over different sets of processes.

PyTorch's `clip_grad_norm_` takes those of one mesh. With tensor parallelism there are two: layers are divided by both of its
dimensions, everything else by one.
"""

import math
from collections.abc import Iterable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Replicate
from torch.nn.utils import get_total_norm

from revzoo.checkpoint.slices import get_own_part

_EPS = 1e-6  # as in PyTorch's own


def clip_gradients_(parameters: Iterable[nn.Parameter], most: float) -> None:
    """Scale all gradients so that their norm is at most `most`; all processes call this together."""
    groups: dict[int, list[Tensor]] = {}  # what this process holds, by the number of processes that hold the same
    for gradient in (cast(Any, p.grad) for p in parameters if p.grad is not None):
        groups.setdefault(_count_copies(gradient), []).append(get_own_part(gradient))
    squares = [get_total_norm(parts).square() / copies for copies, parts in groups.items()]
    total = torch.stack(squares).sum()
    dist.all_reduce(total)
    factor = (most / (total.sqrt() + _EPS)).clamp(max=1.0)
    for part in (part for parts in groups.values() for part in parts):
        part.mul_(factor)


def _count_copies(sharded: Any) -> int:
    """Return how many processes hold the same part of a tensor."""
    sizes = zip(sharded.device_mesh.shape, sharded.placements, strict=True)
    parts: int = math.prod(size for size, placement in sizes if not isinstance(placement, Replicate))
    return dist.get_world_size() // parts
