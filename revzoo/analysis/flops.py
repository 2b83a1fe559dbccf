"""Count the arithmetic of a forward and backward; a multiply-add is 2.

The formulas are those of `torch.utils.flop_counter`, and what a user registers there for a kernel. Two are revzoo's own:
PyTorch lacks attention on the CPU before 2.15, and forgets the groups of a convolution in the gradient of its weight.
"""

from collections.abc import Callable, Sequence
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from revzoo.analysis.dry_run import call, isolated, linear_loss
from revzoo.runtime.compiling import leave_uncompiled
from revzoo.runtime.operations import ATTENTION, find_registered_formulas
from revzoo.runtime.replaced_call import is_replaced

FLOPS_PER_BYTE = 16  # what a device computes while it moves a byte: the price of moved bytes in plans that are not timed
FEW_FLOPS = 4 * 10**9  # a CPU runs a step of this many in less time than Python takes for the same step in FakeTensors
Formula = Callable[..., int]  # called with the operation's arguments and, as `out_val`, what it returned


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

    @leave_uncompiled
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

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


def count_operation_flops(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """Return the floating-point operations of one call that returned `out`; 0 for norms, activations, sums, copies."""
    formula = _formula(operation)
    return 0 if formula is None else formula(*args, **kwargs, out_val=out)


def _formula(operation: Any) -> Formula | None:
    packet = getattr(operation, "_overloadpacket", None)
    if packet is None:
        return None
    return _own_formulas().get(packet) or find_registered_formulas().get(packet)


@cache
def _own_formulas() -> dict[Any, Formula]:
    """Return the formulas of all operations that this version of PyTorch has."""
    aten = torch.ops.aten
    return {getattr(aten, name): formula for name, formula in _FORMULAS.items() if hasattr(aten, name)}


def _count_convolution_backward(grad: Tensor, x: Tensor, weight: Tensor, *arguments: Any, **_: Any) -> int:
    """Count as much as the forward for the gradient of the input and for that of the weight, where they are wanted.

    That is one use of every weight at every position: of the output, or of the input where transposed.
    """
    *_before, transposed, _output_padding, _groups, wanted = arguments
    positions = (x if transposed else grad).shape[2:]
    return sum(wanted[:2]) * 2 * x.shape[0] * prod(positions) * weight.numel()


def _count_attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    """Count the scores and the weighted sums of (B, M, N, D); a causal mask saves nothing here, as in PyTorch's formula."""
    B, M, N, D = query.shape
    return 2 * B * M * N * key.shape[-2] * (D + value.shape[-1])


def _count_attention_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    """Count the scores once more, and the gradients of query, key, value and attention weights."""
    B, M, N, D = query.shape
    return 2 * B * M * N * key.shape[-2] * (3 * D + 2 * value.shape[-1])


def _count_lstm_layer(x: Tensor, *weights: Any, **_: Any) -> int:
    """Count the products with the weights of inputs and of states (oneDNN's layer, in one direction)."""
    return 2 * prod(x.shape[:-1]) * sum(weight.numel() for weight in weights[:2])


def _count_cudnn_rnn(x: Tensor, weights: Sequence[Tensor], *_: Any, **__: Any) -> int:
    """Count the products with all weights but biases."""
    return 2 * prod(x.shape[:-1]) * sum(weight.numel() for weight in weights if weight.ndim == 2)


_FORMULAS: dict[str, Formula] = {
    "mkldnn_rnn_layer": _count_lstm_layer,
    "mkldnn_rnn_layer_backward": lambda *args, **kwargs: 2 * _count_lstm_layer(*args, **kwargs),
    "_cudnn_rnn": _count_cudnn_rnn,
    "_cudnn_rnn_backward": lambda *args, **kwargs: 2 * _count_cudnn_rnn(*args, **kwargs),
    "convolution_backward": _count_convolution_backward,
    "_scaled_dot_product_attention_math_for_mps": _count_attention,
    **dict.fromkeys(ATTENTION, _count_attention),
    **{f"{name}_backward": _count_attention_backward for name in ATTENTION},
}
