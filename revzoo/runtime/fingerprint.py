"""Fingerprints of tensors: a few numbers that show when two tensors differ.

    projections    random sums of the elements, in floating point: 8 of all, on an accelerator one of each row of about a
                   thousand. They change by about the norm of the difference, so a mask that differs at one token of thousands
                   is noticed
    sums of bits   of several parts of the tensor, as integers, where every bit counts

Source: the projections are those of Johnson and Lindenstrauss (1984).
"""

import math
from contextlib import nullcontext
from functools import cache
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from revzoo.device import can_read_now, is_capturing

_WIDTH = 1024  # elements that one row of a projection adds up
_LEAST_WIDTH = 128
_PROJECTIONS = 8
_PARTS = (16, 8, 4, 2)  # numbers of parts whose bits are added up, where they divide the number of elements
INDICES = torch.int64, torch.int32, torch.int16
_VMAP = torch._C.DispatchKeySet(cast(Any, torch._C._parse_dispatch_key("VmapMode")))  # it refuses to draw random numbers
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Fingerprint(NamedTuple):
    """What is remembered of a tensor.

    Args:
        values: projections, or sums of bits: on a CPU a list, elsewhere a tensor that the device may not have computed yet.
        kind: strides, whether these are sums of bits, and placements of a DTensor. Only fingerprints of one kind are compared.
        is_finite: False if the tensor is known to hold NaN or infinite numbers; the values are then those of the others.
    """

    values: Any
    kind: tuple[Any, ...]
    is_finite: bool = True


def take_fingerprint(x: Tensor, *, bits: bool = False) -> Fingerprint | None:
    """Return a fingerprint of a tensor of floating-point, complex or boolean numbers, on a CPU also of indices; None of others.

    Args:
        x: the tensor. One without values (meta, fake, a weight that FSDP has freed), with a layout that is not strided, or
            inside a CUDA graph has none.
        bits: whether every bit counts, as in exact arithmetic.
    """
    x, placements = x.detach(), ()
    if type(x) is not Tensor:
        placements = getattr(x, "placements", ())  # of a DTensor
        if not placements:
            return None
        x = cast(Any, x)._local_tensor
        if isinstance(x, FakeTensor):
            return None
    dtype = _choose_dtype(x.dtype, x.device)
    if dtype is None or x.layout is not torch.strided or not x.untyped_storage().nbytes():
        return None
    is_on_host = can_read_now(x)
    if not is_on_host and is_capturing():
        return None
    kind = (x.stride(), bits, placements)
    with _disable_current_modes() if torch._C._len_torch_dispatch_stack() else nullcontext():
        # modes that count bytes or select operations are not to see this one read of it
        x = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x.resolve_neg()
        values = _summarise(x, dtype, bits, is_on_host)
        if not is_on_host:
            return Fingerprint(values, kind)
        numbers = values.tolist()
        if bits or math.isfinite(numbers[0]):  # each projection is of all elements
            return Fingerprint(numbers, kind)
        return Fingerprint(_summarise(x.nan_to_num(0.0, 0.0, 0.0), dtype, False, True).tolist(), kind, is_finite=False)


@cache
def _choose_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype | None:
    """Return the dtype in which projections of such tensors are computed; None for numbers that have none."""
    if device.type == "meta":
        return None
    if dtype.is_complex:
        dtype = dtype.to_real()
    elif dtype in INDICES and device.type == "cpu":
        return torch.float64
    elif dtype is not torch.bool and not dtype.is_floating_point:
        return None  # kernels save workspaces as bytes, and on accelerators as other integers, that they have not written
    return torch.float32 if dtype.itemsize < 4 else dtype  # the sums of rows would overflow in float16


def _summarise(x: Tensor, dtype: torch.dtype, bits: bool, is_on_host: bool) -> Tensor:
    """Return what a fingerprint remembers of the elements, in the order of memory where that takes no copy."""
    x = x.view(-1) if x.is_contiguous() else x.permute(sorted(range(x.dim()), key=x.stride, reverse=True)).reshape(-1)
    if bits:
        return _add_bits(x)
    if dtype is not x.dtype:
        x = x.to(dtype)
    with torch.autocast(x.device.type, enabled=False) if torch._C._is_any_autocast_enabled() else nullcontext():
        return _project(x) if is_on_host else _project_rows(x)


def _add_bits(x: Tensor) -> Tensor:
    """Return the sums of the bits of several parts, as integers."""
    integers = x.view(_INTEGERS[x.element_size()])
    parts = next((n for n in _PARTS if x.numel() % n == 0), 1)
    dtype = torch.int64 if x.element_size() == 8 else torch.int32
    return integers.view(parts, -1).sum(1, dtype=dtype)  # wraps around


def square_bits(x: Tensor) -> Tensor:
    """Return the sum of the squares of the elements' bits, which the compiler adds up where it makes or reads the elements."""
    integers = x.view(_INTEGERS[x.element_size()]).to(torch.int64)
    return (integers * integers).sum()  # wraps around


def _project(x: Tensor) -> Tensor:
    """Return random projections: first rows of _WIDTH elements become one each, until few are left."""
    length, dtype, device = x.numel(), x.dtype, x.device
    while length > _WIDTH:
        rows = length // _WIDTH
        whole = torch.mv(x[: rows * _WIDTH].view(rows, _WIDTH), _make_weights(dtype, device)[0])
        rest = x[rows * _WIDTH :]
        x = torch.cat([whole, rest]) if rest.numel() else whole
        length = x.numel()
    return torch.mv(_make_weights(dtype, device)[:, :length], x)


def _project_rows(x: Tensor) -> Tensor:
    """Return one random projection of each row of elements, by one kernel where rows can be of one length."""
    length = x.numel()
    width = _choose_width(length)
    return _project(x) if width is None else torch.mv(x.view(-1, width), _make_weights(x.dtype, x.device)[0, :width])


@cache
def _choose_width(length: int) -> int | None:
    """Return the largest divisor of `length` from `_LEAST_WIDTH` to `_WIDTH`; None if there is none."""
    return next((width for width in range(min(_WIDTH, length), _LEAST_WIDTH - 1, -1) if length % width == 0), None)


@cache  # whatever the length: a new one would be a copy to the device, which waits
def _make_weights(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return random weights, the same in every call. Shape: (_PROJECTIONS, _WIDTH)."""
    generator = torch.Generator("cpu").manual_seed(0)
    with torch._C._ExcludeDispatchKeyGuard(_VMAP):  # where torch.autograd.grad(is_grads_batched=True) may call this
        weights = torch.randn(_PROJECTIONS, _WIDTH, generator=generator, dtype=torch.float64, device="cpu")
    return weights.to(device, dtype)
