"""The update of divided parameters: are they clipped and updated as whole ones?

PyTorch's DTensor makes most operations what they are for the whole tensor, such as a norm over all processes. An optimizer that
mixes it with tensors of its own, or takes apart what it is given, raises an error or computes something else. PyTorch's
`clip_grad_norm_` takes parameters of one mesh. With tensor parallelism there are two: layers are divided by both of its
dimensions, everything else by one.
"""

import math
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from revzoo.analysis.optimizer_step import copy_optimizer
from revzoo.checkpoint.slices import copy_whole_, gather_whole, get_own_part
from revzoo.sharding.mesh import leave_out_tensor, read_sizes

_SHAPES = ((33,), (32, 48), (24, 20, 3, 3))  # the first is not divided evenly; some optimizers treat small matrices apart
_STEPS = 3
_TOLERANCE = 0.02  # of what the steps have moved a parameter: Muon computes in bfloat16


def updates_divided(optimizer: Optimizer, mesh: DeviceMesh) -> bool:
    """Return whether divided parameters get the same values as whole ones, but for rounding, from state that can be saved.

    That is tried out, with a few small parameters. All processes of the mesh call this together.
    """
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        module = _make_parameters(mesh)
        starts = [p.detach().clone() for p in module.parameters()]
        whole = [nn.Parameter(t.clone()) for t in starts]
        try:
            divided = _divide(module, mesh)
            first, second = _copy_for(optimizer, whole), _copy_for(optimizer, divided)
            for _ in range(_STEPS):
                for p, part in zip(whole, divided, strict=True):
                    p.grad = torch.randn(p.shape, generator=generator).to(p.device)
                    part.grad = torch.empty_like(part)
                    copy_whole_(part.grad, p.grad)
                first.step()
                second.step()
            ends = [gather_whole(part) for part in divided]
        except Exception:  # whatever an optimizer raises that does not expect a DTensor
            return False
    rows = zip(starts, whole, ends, strict=True)
    is_same = all((p - end).norm() <= _TOLERANCE * (p - start).norm() for start, p, end in rows)
    return is_same and _can_be_saved(second, divided)


def _make_parameters(mesh: DeviceMesh) -> nn.Module:
    """Return a module of parameters of several shapes, and of layers that are divided where the mesh divides layers."""
    with torch.device(mesh.device_type):
        module = nn.Module()
        module.parts = nn.ParameterList([torch.randn(shape) for shape in _SHAPES])
        if size := read_sizes(mesh).get("tensor"):
            module.columns, module.rows = nn.Linear(32, 24 * size), nn.Linear(24 * size, 32)
    return module


def _divide(module: nn.Module, mesh: DeviceMesh) -> list[nn.Parameter]:
    """Divide a module as a network is divided; return its parameters."""
    if "tensor" in read_sizes(mesh):
        plan = {"columns": ColwiseParallel(), "rows": RowwiseParallel()}
        parallelize_module(module, mesh["tensor"], plan, src_data_rank=None)
    fully_shard(module, mesh=leave_out_tensor(mesh))
    return list(module.parameters())


def _can_be_saved(optimizer: Optimizer, parameters: Iterable[Tensor]) -> bool:
    """Return whether all that is divided in the state is divided as its parameter is."""
    return all(t.shape == p.shape for p in parameters for t in optimizer.state[p].values() if isinstance(t, DTensor))


def _copy_for(optimizer: Optimizer, parameters: list[nn.Parameter]) -> Optimizer:
    return copy_optimizer(optimizer, [{**optimizer.param_groups[0], "params": parameters}])


_EPS = 1e-6  # as in PyTorch's own


def clip_gradients_(parameters: Iterable[nn.Parameter], most: float) -> None:
    """Scale all gradients so that their norm is at most `most`; all processes call this together."""
    groups: dict[int, list[Tensor]] = {}  # what this process holds, by the number of processes that hold the same
    for gradient in (cast(Any, p.grad) for p in parameters if p.grad is not None):
        groups.setdefault(_count_copies(gradient), []).append(get_own_part(gradient))
    squares = [get_total_norm(parts).square() / copies for copies, parts in groups.items()]
    total = torch.stack(squares).sum()
    distributed.all_reduce(total)
    factor = (most / (total.sqrt() + _EPS)).clamp(max=1.0)
    for part in (part for parts in groups.values() for part in parts):
        part.mul_(factor)


def _count_copies(sharded: Any) -> int:
    """Return how many processes hold the same part of a tensor."""
    sizes = zip(sharded.device_mesh.shape, sharded.placements, strict=True)
    parts: int = math.prod(size for size, placement in sizes if not isinstance(placement, Replicate))
    return distributed.get_world_size() // parts
