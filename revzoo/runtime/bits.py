"""Packing of the bits that an integer division by 2^s loses; kept, they make the division reversible."""

from typing import NamedTuple

import torch
from torch import Tensor

from revzoo.device import is_sharded

_WIDTHS = (8, 4, 2, 1)  # fields of these widths fill a byte without gaps; every number of bits is a sum of some of them


class PackedBits(NamedTuple):
    """What `pack` returns and `unpack` takes.

    Args:
        fields: flat uint8 tensors, one for each power of two in `bits`.
        bits: number of bits of each integer.
        dims: the dimensions of the integers, the one with the largest stride first.
        shape: the size of each of these.
    """

    fields: list[Tensor]
    bits: int
    dims: list[int]
    shape: torch.Size


def choose_dtype(bits: int) -> torch.dtype:
    """Return the smallest dtype that `pack` takes for integers of this many bits."""
    return torch.uint8 if bits <= 8 else torch.int16


def pack(values: Tensor, bits: int) -> PackedBits | Tensor:
    """Pack integers below 2^bits into at most bits * ceil(numel / 8) bytes.

    Returns the values as they are where packing gains nothing, and for a DTensor, since flattening would change its sharding.

    Shapes: values: any, of the dtype that `choose_dtype` returns.
    Args:
        values: the integers; those of a dense tensor are packed in the order of memory.
        bits: from 1 to 15.
    """
    if bits == 8 or is_sharded(values):
        return values
    dims = list(range(values.dim()))
    if not values.is_contiguous():
        dims.sort(key=values.stride, reverse=True)
    values = values.permute(dims)
    packed, rest, left = [], values.flatten(), bits
    for width in _WIDTHS:
        if bits & width:
            left -= width
            packed.append(_fold((rest & (2**width - 1) if left else rest).to(torch.uint8), width))
            rest = rest >> width if left else rest
    return PackedBits(packed, bits, dims, values.shape)


def unpack(packed: PackedBits | Tensor) -> Tensor:
    """Return the integers that `pack` was given, in the same dtype."""
    if isinstance(packed, Tensor):
        return packed
    fields, total, shift = iter(packed.fields), None, 0
    for width in _WIDTHS:
        if packed.bits & width:
            field = _unfold(next(fields), width, packed.shape.numel())
            total = field.to(choose_dtype(packed.bits)) if total is None else total.add_(field, alpha=2**shift)
            shift += width
    assert total is not None, "no bits were packed"
    return total.view(packed.shape).permute([packed.dims.index(dim) for dim in range(len(packed.dims))])


def _fold(values: Tensor, width: int) -> Tensor:
    """Put 8 / width values into each byte: the first `len(folded)` into its lowest bits, the next ones above them."""
    count = 8 // width
    if missing := -len(values) % count:
        values = torch.nn.functional.pad(values, (0, missing))
    total, *rows = values.view(count, -1).unbind()
    for i, row in enumerate(rows, 1):
        total = torch.add(total, row, alpha=2 ** (i * width))  # shifts and joins in one pass
    return total


def _unfold(folded: Tensor, width: int, numel: int) -> Tensor:
    fields = folded.new_empty(8 // width, len(folded))
    for i, field in enumerate(fields):
        torch.bitwise_right_shift(folded, i * width, out=field)
    return fields.bitwise_and_(2**width - 1).flatten()[:numel]
