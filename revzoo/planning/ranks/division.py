"""How many ranks share a network, and what each of them holds of it, by arithmetic alone.

FSDP2 cuts each parameter along its first dimension into as many pieces as there are shards, of equal size but for the last, and
fills up the last. The first rank has the largest piece of everything: what it holds, every rank can hold.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, cast, get_args

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from revzoo.analysis.optimizer_step import OptimizerBytes, copy_optimizer, count_optimizer
from revzoo.errors import InputError, UnknownNameError
from revzoo.model.network import Network
from revzoo.sharding.mesh import count_shards, read_sizes
from revzoo.sharding.shard import list_gathered

Divided = Literal["full", "hybrid"]


@dataclass(frozen=True)
class Division:
    """Processes that train one network together.

    Args:
        ranks: number of processes, one for each card.
        shard: "full" divides the network over all of them, "hybrid" over those of each node.
        nodes: machines, with the same number of ranks each.
    """

    ranks: int
    shard: Divided = "full"
    nodes: int = 1

    def __post_init__(self) -> None:
        if self.shard not in get_args(Divided):
            raise UnknownNameError("shard", self.shard, get_args(Divided))
        for name in ("ranks", "nodes"):
            if type(value := getattr(self, name)) is not int or value < 1:
                raise InputError(f"{name} is a whole number of at least 1. Received: {value!r}.")
        if self.ranks % self.nodes:
            raise InputError(
                f"Every node has the same number of ranks. Received: {self.ranks} ranks on {self.nodes} nodes. Give a "
                f"multiple of {self.nodes} ranks."
            )
        count_shards(self.ranks, self.shard, self.nodes)

    @classmethod
    def of(cls, mesh: DeviceMesh) -> "Division":
        """Return the division of ranks that `make_mesh` has arranged."""
        nodes = read_sizes(mesh).get("replicate")
        return cls(mesh.size(), "full" if nodes is None else "hybrid", nodes or 1)

    @property
    def shards(self) -> int:
        """Pieces that each parameter is cut into by FSDP2."""
        return count_shards(self.ranks, self.shard, self.nodes)

    @property
    def copies(self) -> int:
        """How many nodes hold the same piece."""
        return self.ranks // self.shards

    def __str__(self) -> str:
        where = f" on {self.nodes} nodes" if self.nodes > 1 else ""
        return f"{self.ranks} ranks{where}, shard={self.shard}"


@dataclass(frozen=True)
class RankBytes:
    """What the rank with the largest shards holds besides activations.

    Args:
        weights: shards of all parameters.
        gradients: shards of the gradients, as after backward.
        buffers: all buffers; they are not divided.
        optimizer: state and update of the optimizer, of its shards.
        gathered: the most that whole parameters take at once: those of a unit, of the one that is fetched meanwhile, and of the
            root.
    """

    weights: int
    gradients: int
    buffers: int
    optimizer: OptimizerBytes
    gathered: int


def count_rank_bytes(model: Network, division: Division, optimizer: Optimizer | None = None) -> RankBytes:
    """Return what the rank with the largest shards holds, whatever the batch and the schedule are.

    Args:
        model: not divided itself, on any device, frozen where it will be.
        division: over which ranks it will be divided.
        optimizer: of the model's parameters; its state is counted as of shards.
    """
    shards = division.shards
    own = {id(p): cast(Tensor, p) for p in model.parameters()}  # what FSDP2 cuts
    units = list_gathered(model)
    inside = {id(p) for unit in units for p in unit.parameters()}
    root = _count_padded_bytes((p for key, p in own.items() if key not in inside), shards)
    sizes = [0, *(_count_padded_bytes((own[id(p)] for p in unit.parameters()), shards) for unit in units)]
    # A unit is copied from the buffer that it arrived in; in backward, the one before it arrives meanwhile.
    gathered = root + max(unit + max(unit, before) for before, unit in pairwise(sizes))
    return RankBytes(
        weights=_count_padded_bytes(own.values(), shards) // shards,
        gradients=_count_padded_bytes((p for p in own.values() if p.requires_grad), shards) // shards,
        buffers=sum(b.nbytes for b in model.buffers()),
        optimizer=_count_optimizer(model, optimizer, own, shards),
        gathered=gathered,
    )


def _count_padded_bytes(tensors: Iterable[Tensor], shards: int) -> int:
    """Return the bytes of tensors, each filled up so that it can be cut into equal pieces."""
    return sum(_count_rows(t, shards) * shards * math.prod(t.shape[1:]) * t.itemsize for t in tensors)


def _count_rows(t: Tensor, shards: int) -> int:
    """Return along the first dimension the length of the largest piece."""
    return -(-t.shape[0] // shards)


def _count_optimizer(model: nn.Module, optimizer: Optimizer | None, own: Mapping[int, Tensor], shards: int) -> OptimizerBytes:
    """Return what an optimizer takes of the shards of its parameters."""
    if optimizer is None:
        return count_optimizer(model, None)
    pieces = {
        key: nn.Parameter(torch.empty(_count_rows(p, shards), *p.shape[1:], dtype=p.dtype, device="meta"), p.requires_grad)
        for key, p in own.items()
    }
    groups = [{**group, "params": [pieces[id(p)] for p in group["params"]]} for group in optimizer.param_groups]
    return count_optimizer(nn.ParameterList(pieces.values()), copy_optimizer(optimizer, groups))
