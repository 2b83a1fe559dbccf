"""Does an optimizer update divided parameters as it updates whole ones?

PyTorch's DTensor makes most operations what they are for the whole tensor, such as a norm over all processes. An optimizer that
mixes it with tensors of its own, or takes apart what it is given, raises an error or computes something else.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from revzoo.analysis.optimizer_step import copy_optimizer
from revzoo.checkpoint.slices import copy_whole_, gather_whole

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
        with torch.device(mesh.device_type):
            module = nn.ParameterList([torch.randn(shape) for shape in _SHAPES])
        starts = [p.detach().clone() for p in module.parameters()]
        whole = [nn.Parameter(t.clone()) for t in starts]
        try:
            fully_shard(module, mesh=mesh)
            divided = list(module.parameters())
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


def _can_be_saved(optimizer: Optimizer, parameters: Iterable[Tensor]) -> bool:
    """Return whether all that is divided in the state is divided as its parameter is."""
    return all(t.shape == p.shape for p in parameters for t in optimizer.state[p].values() if isinstance(t, DTensor))


def _copy_for(optimizer: Optimizer, parameters: list[nn.Parameter]) -> Optimizer:
    return copy_optimizer(optimizer, [{**optimizer.param_groups[0], "params": parameters}])
