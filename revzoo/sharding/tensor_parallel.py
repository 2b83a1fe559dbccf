"""Divide the products of layers over processes by PyTorch's tensor parallelism: each computes its heads and hidden channels.

The streams are whole in every process, so that recovering a step needs no other one. A branch adds up what the processes have
computed when it has run, in forward and where it runs again, and its input's gradient in backward: one all-reduce each. The
parts name what is divided (`revzoo.parts.tensor_plan`); parts without a plan are whole in every process, and all compute them.

Source: Shoeybi et al. 2019, "Megatron-LM", section 3; `torch.distributed.tensor.parallel`.
"""

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import _disable_current_modes

from revzoo.checkpoint.slices import RowOrder
from revzoo.errors import InputError, join_names
from revzoo.model.network import Model
from revzoo.parts.tensor_plan import TensorPlan

_MOST_WHOLE = 0.1  # of the weights that have plans, in parts that stay whole
# PyTorch remarks once that what is divided twice is gathered by two collectives, about which nothing can be done here.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


def choose_parts(model: Model, processes: int) -> dict[str, TensorPlan]:
    """Return the plans of the parts that so many processes divide, by path.

    A part whose heads or hidden channels they cannot share equally stays whole in all of them, if such parts hold at most a
    tenth of the weights: those of the first stage, where there are few heads.

    Raises:
        InputError: the processes cannot divide the network's layers.
    """
    plans = {name: plan for name, module in model.named_modules() if (plan := getattr(module, "tensor_plan", None))}
    if not plans:
        raise InputError(
            f"tensor_parallel divides attention and MLPs. Received: tensor_parallel={processes} for {model.spec.name}, which "
            "has neither: convolutions are not divided. Use tensor_parallel=1; shard=full divides the weights of every layer."
        )
    sizes = {path: _count_weights(model.get_submodule(path), plan) for path, plan in plans.items()}
    whole = [path for path, plan in plans.items() if plan.count % processes]
    if sum(sizes[path] for path in whole) > _MOST_WHOLE * sum(sizes.values()):
        counts = [f"{plans[path].count} {plans[path].noun} of {path}" for path in whole]
        raise InputError(
            f"The processes of tensor_parallel share heads and hidden channels equally. Received: tensor_parallel={processes} "
            f"for the {join_names(counts, most=2)}. Use {join_names(_list_possible(plans, sizes), most=8)}."
        )
    return {path: plan for path, plan in plans.items() if path not in whole}


def divide_layers_(model: Model, mesh: DeviceMesh) -> None:
    """Divide the layers of a network over the processes of a mesh of one dimension, in place, before `fully_shard`.

    The network has the same values in every process, or is on the meta device. Nothing is communicated.

    Raises:
        InputError: the network cannot be divided like this.
    """
    for path, plan in choose_parts(model, mesh.size()).items():
        _divide_part_(model.get_submodule(path), plan, mesh)


def _count_weights(part: nn.Module, plan: TensorPlan) -> int:
    return sum(part.get_submodule(path).get_parameter("weight").numel() for path in (*plan.columns, plan.rows))


def _list_possible(plans: Mapping[str, TensorPlan], sizes: Mapping[str, int]) -> list[str]:
    """Return the numbers of processes that can share enough of the parts."""
    most = (1 - _MOST_WHOLE) * sum(sizes.values())
    counts = range(1, max(plan.count for plan in plans.values()) + 1)
    return [str(n) for n in counts if sum(sizes[path] for path, plan in plans.items() if plan.count % n == 0) >= most]


def _divide_part_(part: nn.Module, plan: TensorPlan, mesh: DeviceMesh) -> None:
    styles = {path: ColwiseParallel() if pieces == 1 else _Dealt(pieces) for path, pieces in plan.columns.items()}
    parallelize_module(part, mesh, {**styles, plan.rows: RowwiseParallel()}, src_data_rank=None)
    for path in plan.numbers:
        owner, _, name = path.rpartition(".")
        module = part.get_submodule(owner)
        setattr(module, name, getattr(module, name) // mesh.size())
    for path, dimension in plan.parameters.items():
        owner, _, name = path.rpartition(".")
        _OwnPart(part.get_submodule(owner), name, dimension, mesh)
    if plan.draws:
        _OwnNumbers(part.get_submodule(next(iter(plan.columns))), part.get_submodule(plan.rows), mesh.get_local_rank())


class _Dealt(ColwiseParallel):
    """Divide a linear layer that computes several things at once, so that every process has its part of each."""

    def __init__(self, pieces: int):
        super().__init__()
        self._pieces = pieces

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        order = RowOrder(self._pieces, device_mesh.size())
        for name, parameter in list(module.named_parameters()):
            module.register_parameter(name, nn.Parameter(order.deal(parameter.detach()), parameter.requires_grad))
        order.mark(module)
        return super()._apply(module, device_mesh)


class _OwnPart:
    """Divides a parameter that is no linear layer's, and gives a module the process's own part of it while it runs.

    Args:
        module: the module that uses it.
        name: of the parameter.
        dimension: along which it is divided; None: every process uses all of it, and their gradients are added up.
        mesh: the processes.
    """

    def __init__(self, module: nn.Module, name: str, dimension: int | None, mesh: DeviceMesh):
        parameter = module.get_parameter(name)
        placement = Replicate() if dimension is None else Shard(dimension)
        divided = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(divided, parameter.requires_grad))
        self._name, self._gradients = name, [Partial() if dimension is None else placement]
        self._whole: Any = None
        module.register_forward_pre_hook(self._take)
        module.register_forward_hook(self._give_back, always_call=True)

    def _take(self, module: nn.Module, inputs: Any) -> None:
        self._whole = module._parameters[self._name]  # a DTensor; FSDP2 has gathered it
        module._parameters[self._name] = self._whole.to_local(grad_placements=self._gradients)

    def _give_back(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        module._parameters[self._name] = self._whole


class _OwnNumbers:
    """Between two layers each process draws random numbers of its own; behind them, all draw the same again.

    The numbers follow from the generators before, so that a second run that begins with the same state has the same ones.

    Args:
        first: layer before which they begin.
        last: layer before which they end.
        rank: of this process among those that divide the layers.
    """

    def __init__(self, first: nn.Module, last: nn.Module, rank: int):
        self._rank, self._states = rank, list[tuple[Any, Tensor]]()
        first.register_forward_pre_hook(self._begin)
        last.register_forward_pre_hook(self._end)

    def _begin(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if not module.training:
            return
        with _disable_current_modes():  # where bytes are counted without values, this number has one
            seed = int(torch.randint(2**62, (), device="cpu"))
        device = inputs[0].device
        places = [torch.random] if device.type == "cpu" else [torch.random, torch.get_device_module(device)]
        self._states = [(place, place.get_rng_state()) for place in places]
        torch.manual_seed(seed + self._rank)

    def _end(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        for place, state in self._states:
            place.set_rng_state(state)
        self._states = []
