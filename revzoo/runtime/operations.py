"""What is known of an operation: whether it is expensive, what it may do.

Matrix products, convolutions and attention are nearly all of a network's arithmetic. Mode `selective` keeps their outputs, and
`revzoo.analysis.flops` counts them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

_CONTROL_FLOW = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


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

    def list_written(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """Return the arguments that a call changes in place, tensors or lists of them."""
        return [args[place] if place < len(args) else kwargs.get(name) for place, name in self.written]


@cache
def describe_operation(operation: Any) -> Operation:
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


# Matrix products, convolutions, attention: by name, since not every version of PyTorch has all of them. Attention arrives as
# one of these, or as two batched matrix products where no fused kernel takes its arguments.
ATTENTION = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)
PRODUCTS = frozenset(
    ("mm", "bmm", "_scaled_mm", "addmm", "baddbmm", "convolution", "convolution_backward",
     "_scaled_dot_product_attention_math_for_mps", *ATTENTION, *(f"{name}_backward" for name in ATTENTION))
)  # fmt: skip


def is_compute_intensive(operation: Any) -> bool:
    """Return whether an operation, as a dispatch mode sees it, is a matrix product, a convolution, attention or the like.

    What PyTorch or a user has registered a formula of FLOPs for, such as a kernel, is one, too.
    """
    packet = getattr(operation, "_overloadpacket", None)
    if packet is None:
        return False
    return (operation.namespace == "aten" and packet.__name__ in PRODUCTS) or packet in find_registered_formulas()


def find_registered_formulas() -> dict[Any, Any]:
    """Return what `torch.utils.flop_counter` knows: imported when it is first looked at, which takes a tenth of a second."""
    return _import_flop_counter().flop_registry


@cache
def _import_flop_counter() -> Any:
    from torch.utils import flop_counter

    return flop_counter
