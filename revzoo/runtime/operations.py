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

CAST = torch.ops.aten._to_copy.default
_DETACH = torch.ops.aten.detach.default
Formula = Callable[..., int]  # called with the operation's arguments and, as `out_val`, what it returned
# A tensor whose value decides what is computed next (`if x.max() > 1`, boolean indexing).
_CONTROL_FLOW = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


@dataclass(frozen=True, slots=True)
class Operation:
    """What mode `selective` has to know of an operation. Read once from schema and tags, since reading takes microseconds.

    Only operations of ATen are trusted to do what their schema says. Those of extensions may draw random numbers, or have
    effects, and say nothing of it.

    Attributes:
        run: calls it, faster than the operation itself.
        runs_as_called: whether `run` alone does what a call does; otherwise see `autocast_by`.
        takes_lists: whether an argument of it may hold several tensors.
        is_cast: whether it is a cast, as of a weight under autocast.
        is_compute_intensive: whether it is a matrix product, a convolution, attention or the like.
        is_view: whether its results are in the memory of its first argument.
        is_pure: whether its results depend on its arguments alone, and it changes nothing. `draws` has the last word.
        may_be_skipped: whether it is pure, and running it on the meta device gives the layout of its results. Not for `detach`,
            which autograd calls on what it saves.
        is_compared: whether a second run has to call it as often as the first. Autograd detaches what it saves, autocast casts
            a weight once for several calls, DTensor makes empty tensors once to learn a layout, and subclasses ask for sizes.
        reads_layout_only: whether its results depend on the layout of its arguments only, as those of `zeros_like`.
        leaves_contents_open: whether it returns uninitialised memory.
        decides: whether the values of its arguments decide what is computed next.
        written: position and name of the arguments that it changes in place.
        dropout: position of its argument `dropout_p`; None if it draws random numbers without one, or draws none.
        is_seeded: whether it may draw random numbers.
        autocast_by: if its kernel calls operations to which autocast applies: the operation that autocast sees in its place.
    """

    run: Callable[..., Any]
    runs_as_called: bool = True
    takes_lists: bool = True
    is_cast: bool = False
    is_compute_intensive: bool = False
    is_view: bool = False
    is_pure: bool = False
    may_be_skipped: bool = False
    is_compared: bool = True
    reads_layout_only: bool = False
    leaves_contents_open: bool = False
    decides: bool = False
    written: tuple[tuple[int, str], ...] = ()
    dropout: int | None = None
    is_seeded: bool = False
    autocast_by: str | None = None

    def draws(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Return whether a call advances the random stream, as attention with dropout does: it has to in every run."""
        if not self.is_seeded or self.dropout is None:
            return self.is_seeded
        return bool(args[self.dropout] if self.dropout < len(args) else kwargs.get("dropout_p", 0))

    def written_values(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """Return the arguments that a call changes in place."""
        return [args[i] if i < len(args) else kwargs.get(name) for i, name in self.written]


@cache
def describe(operation: Any) -> Operation:
    """Return what is known of an operation, as a dispatch mode sees it."""
    if not isinstance(operation, torch._ops.OpOverload):  # a higher-order operation
        return Operation(operation)
    arguments, tags = operation._schema.arguments, operation.tags
    name, is_aten = operation._overloadpacket.__name__, operation.namespace == "aten"
    is_view = operation.is_view or operation in _VIEWS
    asks_layout = operation.namespace == "prim" or name.startswith("sym_")
    is_empty = is_aten and name.startswith(("empty", "new_empty"))
    is_seeded = torch.Tag.nondeterministic_seeded in tags
    decides = not _CONTROL_FLOW.isdisjoint(tags)
    is_pure = is_aten and not operation._schema.is_mutable
    is_simple = is_view or torch.Tag.core in tags or torch.Tag.pointwise in tags
    autocast_by = _AUTOCAST_INSIDE.get(operation)
    return Operation(
        operation._op,
        runs_as_called=autocast_by is None,
        takes_lists=any("Tensor" in str(a.type) and "List" in str(a.type) for a in arguments),
        is_cast=operation is CAST,
        is_compute_intensive=is_compute_intensive(operation),
        is_view=is_view,
        is_pure=is_pure,
        may_be_skipped=is_pure and is_simple and not is_seeded and not decides and operation is not _DETACH,
        is_compared=not (is_empty or asks_layout or operation in (_DETACH, CAST)),
        reads_layout_only=is_pure and (name.endswith("_like") or name.startswith("new_")),
        leaves_contents_open=is_empty,
        decides=decides,
        written=tuple((i, a.name) for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write),
        dropout=next((i for i, a in enumerate(arguments) if a.name == "dropout_p"), None),
        is_seeded=is_seeded,
        autocast_by=autocast_by,
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


# Views in all but name.
_VIEWS = {torch.ops.aten._unsafe_view.default}
# Kernels that call matrix products, and the operation that autocast sees. Where that is none of its own, it applies inside.
_AUTOCAST_INSIDE = {
    torch.ops.aten._trilinear.default: "aten::bilinear",
    torch.ops.aten.linalg_matrix_exp.default: "aten::linalg_matrix_exp",
}
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
