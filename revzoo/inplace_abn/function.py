"""The function: BatchNorm, leaky ReLU, and the node in the graph that keeps the output."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.jit._trace import is_tracing
from torch.nn.modules.batchnorm import _NormBase

from revzoo.errors import InputError
from revzoo.inplace_abn.backward import Backward, read_format, spread
from revzoo.inplace_abn.weak import find_least_weight, find_weak_channels
from revzoo.invertible import refuse_one_value


def uses_batch(layer: _NormBase) -> bool:
    """Return whether a BatchNorm uses the statistics of the batch."""
    return layer.training or layer.running_mean is None or layer.running_var is None


def can_keep_output(layer: _NormBase, x: Tensor) -> bool:
    """Return whether there will be a backward that can rebuild the input of a BatchNorm.

    Not under compilers, tracers, transforms of torch.func and forward-mode derivatives.
    """
    if not (torch.is_grad_enabled() and uses_batch(layer)) or not x.numel():
        return False
    if not (x.requires_grad or (layer.weight is not None and (layer.weight.requires_grad or layer.bias.requires_grad))):
        return False
    if torch.compiler.is_compiling() or is_tracing() or forward_ad._current_level >= 0:
        return False
    return torch._C._functorch.peek_interpreter_stack() is None


def begin_batch(layer: _NormBase) -> tuple[tuple[Tensor | None, Tensor | None], float]:
    """Count a batch as `nn.BatchNorm2d` does; return the running statistics that are read or moved, and their momentum."""
    momentum = 0.0 if layer.momentum is None else layer.momentum
    if layer.training and layer.track_running_stats and layer.num_batches_tracked is not None:
        layer.num_batches_tracked.add_(1)
        if layer.momentum is None:
            momentum = 1.0 / float(layer.num_batches_tracked)
    if layer.training and not layer.track_running_stats:
        return (None, None), momentum
    return (layer.running_mean, layer.running_var), momentum


class InPlaceABNFunction(torch.autograd.Function):
    """BatchNorm of a batch, then leaky ReLU: keeps the output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, slope: float, layer: _NormBase) -> Tensor:
        refuse_one_value(x)
        statistics, momentum = begin_batch(layer)
        z, mean, inverse_deviation = torch.native_batch_norm(x, weight, bias, *statistics, True, momentum, layer.eps)
        channels, xhat = find_weak_channels(layer, z, weight, bias), None
        if channels is not None:
            xhat = x.index_select(1, channels)
            xhat = (xhat - spread(mean[channels], x)) * spread(inverse_deviation[channels], x)
            xhat = xhat.to(x.dtype).contiguous(memory_format=read_format(z))
        ctx.slope, y = slope, F.leaky_relu_(z, slope)
        ctx.save_for_backward(y, weight, bias, inverse_deviation, channels, xhat)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise InputError(
                "An in-place ABN has no second derivative: its input is gone. Received: create_graph=True. Use nn.BatchNorm2d "
                "and the activation as two layers."
            )
        (gradient,) = gradients
        y, weight, bias, inverse_deviation, channels, xhat = ctx.saved_tensors
        own_dtype = None if weight is None else weight.dtype
        dtype = torch.promote_types(inverse_deviation.dtype, torch.float32)
        inverse_deviation = inverse_deviation.to(dtype)
        weight = torch.ones_like(inverse_deviation) if weight is None else weight.to(dtype)
        shift = torch.zeros_like(inverse_deviation) if bias is None else bias.to(dtype)
        # Channels below the bound keep xhat, but for those that have got there in one step on an accelerator.
        bound = 1 / find_least_weight(y.dtype)
        factor = weight.reciprocal().clamp(-bound, bound)
        if channels is not None:
            shift, factor = shift.index_fill(0, channels, 0.0), factor.index_fill(0, channels, 1.0)
        scale = weight * inverse_deviation
        backward = Backward(ctx.slope, gradient, y, channels, xhat, shift, factor, scale, ctx.needs_input_grad[0])
        dx, dweight, dbias = backward.run()
        of_parameters = (None, None) if own_dtype is None else (dweight.to(own_dtype), dbias.to(own_dtype))
        return dx, *of_parameters, None, None
