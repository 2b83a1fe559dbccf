"""Ordinary, non-invertible modules between chains: stems, transitions, heads."""

from typing import Any

import torch
from torch import Tensor, nn

from revzoo.runtime.schedule import Mode
from revzoo.runtime.tape import Call, Kept, not_compiled


def run_node(module: nn.Module, name: str, mode: Mode, *inputs: Tensor) -> Any:
    """Call a module, keeping what autograd saves (`store`), its inputs (`recompute`), or these and products (`selective`)."""
    if mode == "store" or not torch.is_grad_enabled() or torch.compiler.is_exporting():
        return module(*inputs)
    return _recorded(module, name, mode, *inputs)


@not_compiled
def _recorded(module: nn.Module, name: str, mode: Mode, *inputs: Tensor) -> Any:
    return Call(module, name, selective=mode == "selective").first(Kept(inputs), *inputs)
