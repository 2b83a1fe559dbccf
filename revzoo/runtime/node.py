"""Ordinary, non-invertible modules between chains: stems, transitions, heads."""

from typing import Any

import torch
from torch import Tensor, nn

from revzoo.runtime.chain import Mode
from revzoo.runtime.tape import Call, Kept, not_compiled


def run_node(module: nn.Module, name: str, mode: Mode, *inputs: Tensor) -> Any:
    """Call a module, keeping what autograd saves (`store`) or only its inputs (`recompute`)."""
    if mode == "store" or not torch.is_grad_enabled() or torch.compiler.is_exporting():
        return module(*inputs)
    return _recompute(module, name, *inputs)


@not_compiled
def _recompute(module: nn.Module, name: str, *inputs: Tensor) -> Any:
    return Call(module, name).first(Kept(inputs), *inputs)
