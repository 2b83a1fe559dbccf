"""Counting arithmetic: what a forward and backward compute."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import conv_flop_count, flop_registry

from revzoo.analysis.dry_run import call, isolated, linear_loss


def count_flops(model: nn.Module, batch: Any) -> int:
    """Return the floating-point operations of one forward and backward of the model as it is now.

    Counted under `FakeTensorMode`, so nothing is computed or allocated. Matrix products, convolutions and attention count
    (a multiply-add is 2); norms, activations and sums do not, so a ratio of FLOPs is not a ratio of times.

    Args:
        batch: a tensor, a tuple or list of positional arguments, or a mapping of keyword arguments.
    Raises:
        InputError: nothing to differentiate.
    """
    flops = FlopCounter()
    with isolated(model, batch, fake=True) as inputs, flops:
        linear_loss(call(model, inputs)).backward()
    return flops.forward + flops.backward


class FlopCounter(TorchDispatchMode):
    """Count the floating-point operations while active, those inside a backward apart from the others.

    PyTorch's formulas, without what `FlopCounterMode` adds to them: it tracks modules, which keeps tensors alive, and
    decomposes operations. So this can be active together with a `LiveBytes`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.forward = 0
        self.backward = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        formula = _FORMULAS.get(getattr(func, "_overloadpacket", None))
        if formula is not None:
            count = formula(*args, **kwargs, out_val=out)
            if torch._C._current_graph_task_id() == -1:
                self.forward += count
            else:
                self.backward += count
        return out


def _convolution_backward(grad: Tensor, x: Tensor, weight: Tensor, *arguments: Any, out_val: Any) -> int:
    """Each gradient takes the products of the forward; PyTorch's formula forgets the groups in that of the weight."""
    *_, transposed, _, _, wanted = arguments
    count: int = sum(wanted[:2]) * conv_flop_count(list(x.shape), list(weight.shape), list(grad.shape), transposed)
    return count


_FORMULAS: dict[Any, Callable[..., int]] = {
    **flop_registry,
    torch.ops.aten.convolution_backward: _convolution_backward,
}
