"""Packing of the bits that an integer division by 2^s loses; kept, they make the division reversible."""

from collections.abc import Sequence

import torch
from torch import Tensor

_WIDTHS = (8, 4, 2, 1)  # fields of these widths fill a byte without gaps; every number of bits is a sum of some of them


def pack(values: Tensor, bits: int) -> list[Tensor]:
    """Pack integers below 2^bits into at most bits * ceil(numel / 8) bytes.

    Shapes: values: any, uint8; returns flat uint8 tensors, one for each power of two in `bits`.
    Args:
        values: the integers.
        bits: from 0 to 8.
    """
    packed, rest = [], values.flatten()
    for width in _WIDTHS:
        if bits & width:
            packed.append(rest if width == 8 else _fold(rest & (2**width - 1), width))
            rest = rest if width == 8 else rest >> width
    return packed


def unpack(packed: Sequence[Tensor], bits: int, shape: torch.Size) -> Tensor:
    """Return the integers that `pack` was given, as uint8 of the given shape."""
    fields, total, shift = iter(packed), None, 0
    for width in _WIDTHS:
        if bits & width:
            field = _unfold(next(fields), width, shape.numel()) << shift
            total = field if total is None else total | field
            shift += width
    assert total is not None, "no bits were packed"
    return total.view(shape)


def _fold(values: Tensor, width: int) -> Tensor:
    """Put 8 / width values into each byte."""
    count = 8 // width
    rows = torch.nn.functional.pad(values, (0, -values.numel() % count)).view(count, -1)
    total = rows[0].clone()
    for i in range(1, count):
        total |= rows[i] << i * width
    return total


def _unfold(folded: Tensor, width: int, numel: int) -> Tensor:
    if width == 8:
        return folded
    return torch.cat([folded >> i * width & (2**width - 1) for i in range(8 // width)])[:numel]
