"""Count the arithmetic of a forward and backward."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from revzoo.analysis.dry_run import call, isolated, linear_loss
from revzoo.analysis.operation_flops import count_operation_flops
from revzoo.runtime.replaced_call import is_replaced


def count_flops(model: nn.Module, batch: Any) -> int:
    """Return the floating-point operations of one forward and backward of the model as it is now.

    Counted under `FakeTensorMode`, so nothing is computed or allocated. Matrix products, convolutions and attention count
    (a multiply-add is 2); norms, activations and sums do not, so a ratio of FLOPs is not a ratio of times.

    Args:
        batch: a tensor, a tuple or list of positional arguments, or a mapping of keyword arguments.
    Raises:
        InputError: nothing to differentiate.
    """
    flops = FlopCounterOfReplacedCalls() if any(map(is_replaced, model.modules())) else FlopCounter()
    with isolated(model, batch, fake=True) as inputs, flops:
        linear_loss(call(model, inputs)).backward()
    return flops.forward + flops.backward


class FlopCounter(TorchDispatchMode):
    """Count the floating-point operations while active: those inside a backward in `backward`, all others in `forward`.

    The FLOPs of each operation are those of `revzoo.runtime.operations`. PyTorch's `FlopCounterMode` also tracks modules, which
    keeps tensors alive, and decomposes operations; this one does neither, so it can be active together with a `LiveBytes`.
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
        count = count_operation_flops(func, args, kwargs, out)
        if torch._C._current_graph_task_id() == -1:
            self.forward += count
        else:
            self.backward += count
        return out


class FlopCounterOfReplacedCalls(FlopCounter):
    """The same for modules whose calls `replaced_call.py` replaces, as `LiveBytesOfReplacedCalls` is for bytes."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True
