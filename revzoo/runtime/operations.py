"""What is known of an operation: whether it is expensive, how many floating-point operations it takes, what it may do.

Matrix products, convolutions and attention are nearly all of a network's arithmetic. Mode `selective` keeps their outputs, and
`revzoo.analysis.flops` counts them; a multiply-add is 2.

The formulas are revzoo's own, so that the figures are the same on every supported PyTorch: `torch.utils.flop_counter` lacks
attention on the CPU before 2.15 and forgets the groups of a convolution in the gradient of its weight. What is registered there
beyond these operations, by PyTorch or by a user for a kernel, counts too.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor

_CONTROL_FLOW = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
Formula = Callable[..., int]  # called with the operation's arguments and, as `out_val`, what it returned


@dataclass(frozen=True, slots=True)
class Operation:
    """What is known of an operation. Read once from schema and tags, since reading takes microseconds.

    Attributes:
        run: calls it, faster than the operation itself.
        is_product: whether it is a matrix product, a convolution, attention or the like of ATen's, and writes nothing in place.
            Operations of extensions may draw random numbers, or have effects, and say nothing of it.
        written: position and name of the arguments that it changes in place.
        reads_layout_only: whether its results depend on the layout of its arguments only, as those of `zeros_like`.
        leaves_contents_open: whether it returns uninitialised memory, which may be filled where no dispatch mode sees it.
        decides: whether the values of its arguments decide what is computed next (`if x.max() > 1`, boolean indexing).
        dropout: position of its argument `dropout_p`; None if it draws random numbers without one, or draws none.
        is_seeded: whether it may draw random numbers.
    """

    run: Callable[..., Any]
    is_product: bool = False
    written: tuple[tuple[int, str], ...] = ()
    reads_layout_only: bool = False
    leaves_contents_open: bool = False
    decides: bool = False
    dropout: int | None = None
    is_seeded: bool = False

    def draws(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Return whether a call advances the random stream, as attention with dropout does: it has to in every run."""
        if not self.is_seeded or self.dropout is None:
            return self.is_seeded
        return bool(args[self.dropout] if self.dropout < len(args) else kwargs.get("dropout_p", 0))


@cache
def describe(operation: Any) -> Operation:
    """Return what is known of an operation, as a dispatch mode sees it."""
    if not isinstance(operation, torch._ops.OpOverload):  # a higher-order operation
        return Operation(operation)
    arguments, name = operation._schema.arguments, operation._overloadpacket.__name__
    return Operation(
        operation._op,
        is_product=is_compute_intensive(operation) and operation.namespace == "aten" and not operation._schema.is_mutable,
        written=tuple((i, a.name) for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write),
        reads_layout_only=name.endswith("_like") or name.startswith("new_"),
        leaves_contents_open=name.startswith(("empty", "new_empty")),
        decides=not _CONTROL_FLOW.isdisjoint(operation.tags),
        dropout=next((i for i, a in enumerate(arguments) if a.name == "dropout_p"), None),
        is_seeded=torch.Tag.nondeterministic_seeded in operation.tags,
    )


def is_compute_intensive(operation: Any) -> bool:
    """Return whether an operation, as a dispatch mode sees it, is a matrix product, a convolution, attention or the like."""
    return _formula(operation) is not None


def count_operation_flops(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """Return the floating-point operations of one call that returned `out`; 0 for norms, activations, sums, copies."""
    formula = _formula(operation)
    return 0 if formula is None else formula(*args, **kwargs, out_val=out)


def _formula(operation: Any) -> Formula | None:
    packet = getattr(operation, "_overloadpacket", None)
    if packet is None:
        return None
    return _own_formulas().get(packet) or _registered_formulas().get(packet)


@cache
def _own_formulas() -> dict[Any, Formula]:
    """Return the formulas of all operations that this version of PyTorch has."""
    aten = torch.ops.aten
    return {getattr(aten, name): formula for name, formula in _FORMULAS.items() if hasattr(aten, name)}


def _registered_formulas() -> dict[Any, Formula]:
    registered: dict[Any, Formula] = _import_flop_counter().flop_registry
    return registered


@cache
def _import_flop_counter() -> Any:
    """Import PyTorch's table when it is first looked at: that takes a tenth of a second."""
    from torch.utils import flop_counter

    return flop_counter


def _count_product(left: Tensor, right: Tensor, *_: Any, **__: Any) -> int:
    """Count (..., M, K) @ (..., K, N)."""
    return 2 * left.numel() * right.shape[-1]


def _count_added_product(_: Tensor, left: Tensor, right: Tensor, *__: Any, **___: Any) -> int:
    return _count_product(left, right)


def _count_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    *_: Any,
    out_val: Tensor,
    **__: Any,
) -> int:
    return _count_convolution_of(x, weight, out_val, transposed)


def _count_convolution_of(x: Tensor, weight: Tensor, out: Tensor, transposed: bool) -> int:
    """Count one use of every weight at every position: of the output, or of the input where transposed."""
    positions = (x if transposed else out).shape[2:]
    return 2 * x.shape[0] * prod(positions) * weight.numel()


def _count_convolution_backward(grad: Tensor, x: Tensor, weight: Tensor, *arguments: Any, **_: Any) -> int:
    """Count as much as the forward for the gradient of the input and for that of the weight, where they are wanted."""
    *_before, transposed, _output_padding, _groups, wanted = arguments
    count: int = sum(wanted[:2]) * _count_convolution_of(x, weight, grad, transposed)
    return count


def _count_attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    """Count the scores and the weighted sums of (B, M, N, D); a causal mask saves nothing here, as in PyTorch's formula."""
    B, M, N, D = query.shape
    return 2 * B * M * N * key.shape[-2] * (D + value.shape[-1])


def _count_attention_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    """Count the scores once more, and the gradients of query, key, value and attention weights."""
    B, M, N, D = query.shape
    return 2 * B * M * N * key.shape[-2] * (3 * D + 2 * value.shape[-1])


_ATTENTION = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)
# By name, since not every version of PyTorch has all of them. `scaled_dot_product_attention` arrives as one of _ATTENTION, or
# as two batched matrix products where no fused kernel takes its arguments.
_FORMULAS: dict[str, Formula] = {
    "mm": _count_product,
    "bmm": _count_product,
    "_scaled_mm": _count_product,
    "addmm": _count_added_product,
    "baddbmm": _count_added_product,
    "convolution": _count_convolution,
    "convolution_backward": _count_convolution_backward,
    "_scaled_dot_product_attention_math_for_mps": _count_attention,
    **dict.fromkeys(_ATTENTION, _count_attention),
    **{f"{name}_backward": _count_attention_backward for name in _ATTENTION},
}
