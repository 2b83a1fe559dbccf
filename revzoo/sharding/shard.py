"""Divide a network over processes by PyTorch's FSDP2: which parts are gathered together.

A unit is gathered before it runs and freed after it, in forward, in backward, and where a reversible step runs again. Every
process holds its share of everything, and at any time one unit in full, or two while the next is being gathered.

Source: `torch.distributed.fsdp.fully_shard`; Zhao et al. 2023, "PyTorch FSDP".
"""

import re
import warnings
from collections import Counter
from typing import Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from revzoo.model.network import Network

Precision = Literal["no", "bf16", "fp16"]


def list_gathered(model: Network) -> list[nn.Module]:
    """Return the modules that are gathered by themselves, in the order of the forward; the rest is gathered as one, the root.

    They are the reversible steps and the nodes: stem, transitions, fuse, head. Left to the root are modules without parameters,
    those that share one with another module, such as a head with the embedding of the stem, and layers with an inverse of their
    own, which backward runs without calling them.
    """
    modules = dict.fromkeys(entry.module for entry in model.layout() if entry.kind in ("step", "node"))
    owners = Counter(id(p) for module in modules for p in module.parameters())
    owners += Counter({id(p): 1 for p in _list_others(model, list(modules))})
    return [m for m in modules if (owned := list(m.parameters())) and all(owners[id(p)] == 1 for p in owned)]


def _list_others(model: nn.Module, modules: list[nn.Module]) -> list[nn.Parameter]:
    """Return the parameters of all modules that stand in none of these."""
    inside = {id(m) for module in modules for m in module.modules()}
    return [p for m in model.modules() if id(m) not in inside for p in m.parameters(recurse=False)]


def shard_(model: Network, mesh: DeviceMesh, *, precision: Precision = "no", offload: bool = False) -> None:
    """Divide a network over the processes of a mesh, in place; make its optimizer afterwards.

    Parameters become DTensors of which each process holds its shard, on the mesh's device. Buffers stay whole. On the meta
    device nothing is allocated.

    Args:
        model: the network, with the same values in every process. What is frozen must be so already.
        mesh: made by `make_mesh`.
        precision: of the autocast under which the model runs; unless it is "no", the model returns float32. Parameters are
            gathered as they are: autocast rounds what it must, and norms see the weights that they see in one process.
        offload: keep shards, their gradients and with them the optimizer's state on the host.
    """
    host = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if offload else OffloadPolicy()
    for unit in list_gathered(model):
        fully_shard(unit, mesh=mesh, offload_policy=host, reshard_after_forward=True)
    policy = MixedPrecisionPolicy(output_dtype=None if precision == "no" else torch.float32)
    # The root is freed after forward too: nobody outside a forward or backward ever meets a gathered parameter.
    fully_shard(model, mesh=mesh, offload_policy=host, mp_policy=policy, reshard_after_forward=True)
    ignore_view_warnings(model)


def ignore_view_warnings(model: Network) -> None:
    """Ignore FSDP2's warnings that steps and nodes of a divided network return views, in this process from now on.

    It warns because a view that is changed in place would lose the hook of its gradient. Steps and nodes hand what they return
    only to the network, which changes nothing in place. What the head returns is the user's, so there the warning stays.
    """
    units = [entry.module for entry in model.layout() if entry.module is not model.head]
    if names := sorted({type(unit).__name__ for unit in units if isinstance(unit, FSDPModule)}):
        pattern = "|".join(map(re.escape, names))
        warnings.filterwarnings("ignore", rf"FSDP2-wrapped module \(({pattern})\) returned a view tensor")
