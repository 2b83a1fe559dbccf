"""Copy whole tensors into sharded ones and back: a DTensor of PyTorch holds a slice of the tensor in every process."""

from typing import Any, cast

import torch
from torch import Tensor

from revzoo.device import is_sharded


def find_own_slice(tensor: Tensor) -> tuple[slice, ...]:
    """Return which part of the whole tensor this process holds, as an index of the whole."""
    [chunk] = cast(Any, tensor).__create_chunk_list__()  # what torch.distributed.checkpoint asks a tensor
    return tuple(slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True))


def get_own_part(tensor: Tensor) -> Tensor:
    """Return the values that this process holds; writing into them writes into the tensor."""
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad():
        part: Tensor = cast(Any, tensor).to_local()
    return part


@torch.no_grad()
def copy_whole_(tensor: Tensor, whole: Tensor) -> None:
    """Copy a whole tensor into one that may be sharded: this process copies its slice. Dtype and device may differ.

    Of a `whole` that is mapped from a file, only the slice is read.
    """
    get_own_part(tensor).copy_(whole[find_own_slice(tensor)] if is_sharded(tensor) else whole)


@torch.no_grad()
def gather_whole(tensor: Tensor) -> Tensor:
    """Return the whole tensor, on the device on which its processes talk; all of them must call this."""
    if not is_sharded(tensor):
        return tensor.detach()
    sharded = cast(Any, tensor.detach())
    return sharded.to(sharded.device_mesh.device_type).full_tensor()  # offloaded ones are on the host
