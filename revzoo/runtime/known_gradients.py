"""A number whose gradients are known already, because they were computed in forward."""

from typing import Any

import torch
from torch import Tensor

from revzoo.errors import InputError


class KnownGradients(torch.autograd.Function):
    """Return a number: `apply(number, count, *tensors, *gradients)`, with the gradient of each of `count` tensors."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, count: int, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors[count:])
        ctx.dtypes = [tensor.dtype for tensor in tensors[:count]]
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        is_traced = torch.compiler.is_compiling()
        if not is_traced and torch.is_grad_enabled():
            raise InputError(
                "chunked_loss has first derivatives only. Received: a backward with create_graph=True. Use "
                "torch.nn.functional.cross_entropy where its gradient is differentiated again."
            )
        # In place, unless this runs again: AccumulateGrad then takes what nobody else holds as the parameter's gradient.
        is_kept = is_traced or torch._C._autograd._get_current_graph_task_keep_graph()
        multiply = Tensor.mul if is_kept else Tensor.mul_
        sums = [multiply(known, gradient).to(dtype) for known, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)]
        return None, None, *sums, *(None for _ in sums)
