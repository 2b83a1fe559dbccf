"""Copy whole tensors into sharded ones and back: a DTensor of PyTorch holds a slice of the tensor in every process.

A layer that computes several things at once, such as queries, keys and values, may be divided so that every process has its
part of each. Then its rows are dealt out: to PyTorch the tensor is one whose rows are in that `RowOrder`. Files and states hold
the ordinary order, and everything here translates.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from revzoo.sharded import is_sharded


@dataclass(frozen=True)
class RowOrder:
    """The rows of a tensor of several pieces, dealt out to processes, each of which gets an equal part of every piece.

    Args:
        pieces: number of pieces, one after the other in the ordinary order.
        processes: among which each piece is divided; their parts are one after the other in the dealt order.
    """

    pieces: int
    processes: int

    def deal(self, ordinary: Tensor) -> Tensor:
        """Return the tensor in the dealt order."""
        return _swap(ordinary, self.pieces, self.processes)

    def restore(self, dealt: Tensor) -> Tensor:
        """Return the tensor in the ordinary order."""
        return _swap(dealt, self.processes, self.pieces)

    def mark(self, module: nn.Module) -> None:
        """Say that the parameters of a module are in this order; `find_row_orders` reads it."""
        module.row_order = cast(Any, self)


def _swap(tensor: Tensor, outer: int, inner: int) -> Tensor:
    """Return rows in `outer` groups of `inner` ones in groups of the inner number instead."""
    blocks: Tensor = tensor.view(outer, inner, -1, *tensor.shape[1:])
    return blocks.transpose(0, 1).flatten(0, 2)


def find_row_orders(model: nn.Module) -> dict[str, RowOrder]:
    """Return the order of the parameters whose rows have been dealt out, by their keys in the state dict."""
    marked = [(name, module) for name, module in model.named_modules() if hasattr(module, "row_order")]
    return {f"{name}.{key}": cast(Any, module).row_order for name, module in marked for key, _ in module.named_parameters()}


def find_own_slice(tensor: Tensor, order: RowOrder | None = None) -> tuple[Any, ...]:
    """Return which part of the whole tensor, in its ordinary order, this process holds, as an index of the whole."""
    [chunk] = cast(Any, tensor).__create_chunk_list__()  # what torch.distributed.checkpoint asks a tensor
    first, *others = (slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True))
    return first if order is None else order.deal(torch.arange(len(tensor)))[first], *others


def get_own_part(tensor: Tensor) -> Tensor:
    """Return the values that this process holds; writing into them writes into the tensor."""
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad():
        part: Tensor = cast(Any, tensor).to_local()
    return part


@torch.no_grad()
def copy_whole_(tensor: Tensor, whole: Tensor, order: RowOrder | None = None) -> None:
    """Copy a whole tensor into a tensor, of which this process takes its slice; dtype and device may differ.

    Of a `whole` that is mapped from a file, only the slice is read.
    """
    get_own_part(tensor).copy_(whole[find_own_slice(tensor, order)] if is_sharded(tensor) else whole)


@torch.no_grad()
def gather_whole(tensor: Tensor, order: RowOrder | None = None) -> Tensor:
    """Return the whole tensor, on the device on which its processes talk; all of them must call this."""
    if not is_sharded(tensor):
        return tensor.detach()
    sharded = cast(Any, tensor.detach())
    whole: Tensor = sharded.to(sharded.device_mesh.device_type).full_tensor()  # offloaded ones are on the host
    return whole if order is None else order.restore(whole)


def restore_rows(tensors: Mapping[str, Tensor], orders: Mapping[str, RowOrder]) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor by name; of those whose rows have been dealt out, a copy, divided likewise, in the ordinary order.

    All processes must call this. One tensor at a time is whole.
    """
    for name, tensor in tensors.items():
        if name in orders:
            dealt, tensor = tensor, torch.empty_like(tensor)
            copy_whole_(tensor, gather_whole(dealt, orders[name]))
        yield name, tensor
