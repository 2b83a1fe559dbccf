"""Exact arithmetic: streams on a grid, on which inversion rebuilds every state bit for bit.

A float32 that is a multiple of 2^-q and smaller than 2^(24-q) in magnitude is an integer of at most 24 bits, scaled. Sums and
integer multiples of such numbers are exact. So with the chain's inputs on that grid, W = w * 2^q, and

    forward     R = round(c f(w) + a w)     W[k+1] = R + sign(b) (W[k-1] >> s)          |b| = 2^-s
    inverse                                 W[k-1] = sign(b) (W[k+1] - R) << s | kept

are exact inverses of each other: R is the same number both times, and the s lowest bits of W[k-1], which the shift loses, are
kept (none with s = 0). The gradient ignores the rounding: it is that of the recurrence (straight-through).

Source: the RevNet paper (Gomez et al. 2017, section 3.2) and Maclaurin et al. (2015) suggest fixed point for this, and the
latter a buffer of lost bits; momentumnet (Sander et al. 2021) has one for any rational b. For a power of two,
a shift is enough.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from revzoo.errors import InputError, RecoveryError
from revzoo.runtime.bits import pack, unpack
from revzoo.runtime.coupling import Coupling

# Binary digits after the point, and in total. The states of trained networks stay far below 2^8 (the largest seen is 0.12 of
# it), and for values above 2^8 float32 itself is coarser than 2^-16.
_GRIDS = {torch.float32: (16, 24), torch.float64: (32, 53)}


class _Round(torch.autograd.Function):
    """Round x to multiples of 1 / scale; the gradient is that of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        return _round_to_grid(x, scale)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _Advance(torch.autograd.Function):
    """One step of the recurrence on the grid; its gradient is that of the recurrence without rounding."""

    @staticmethod
    def forward(ctx: Any, previous: Tensor, current: Tensor, out: Tensor, coupling: Coupling, scale: float) -> Tensor:
        ctx.coupling = coupling
        return _advance(previous, current, out, coupling, scale)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        factors = (ctx.coupling.b, ctx.coupling.a, ctx.coupling.c)
        return *(None if s == 0 else grads[0] if s == 1 else grads[0] * s for s in factors), None, None


def _round_to_grid(x: Tensor, scale: float) -> Tensor:
    return x.mul(scale).round_().div_(scale)


def _round_terms(current: Tensor, out: Tensor, coupling: Coupling, scale: float, into: Tensor | None = None) -> Tensor:
    """Return R as integers. Keep the operations separate: a fused multiply-add may round differently when recomputed."""
    total = torch.mul(out.to(current.dtype), coupling.c * scale, out=into)
    if coupling.a:
        total.add_(current.mul(coupling.a * scale))
    return total.round_()


def _advance(previous: Tensor, current: Tensor, out: Tensor, coupling: Coupling, scale: float) -> Tensor:
    total = _round_terms(current, out, coupling, scale)
    if abs(coupling.b) != 1:
        sign = 1 if coupling.b > 0 else -1
        return total.add_(previous.mul(abs(coupling.b) * scale).floor_(), alpha=sign).div_(scale)
    return total.div_(scale).add_(previous, alpha=coupling.b)


class Grid:
    """The grid of one forward call, and the largest magnitude of its states so far.

    Args:
        dtype: dtype of the streams: torch.float32 (multiples of 2^-16 below 2^8) or torch.float64 (2^-32, 2^21).
        fraction_bits: binary digits after the point, instead of 16 or 32. Fewer allow larger states.

    Raises:
        InputError: another dtype; half precision has too few bits to hold a stream on a grid.
    """

    def __init__(self, dtype: torch.dtype, fraction_bits: int | None = None):
        if dtype not in _GRIDS:
            raise InputError(
                f"Exact arithmetic (exact=True, kept_bits) needs float32 or float64 streams. Received: {dtype}. Use autocast."
            )
        self.dtype = dtype
        fraction, digits = _GRIDS[dtype]
        fraction = fraction if fraction_bits is None else fraction_bits
        self.scale, self.limit = 2.0**fraction, 2.0 ** (digits - fraction)
        self.largest: Tensor | None = None

    def round(self, x: Tensor) -> Tensor:
        """Return x on the grid, in the streams' dtype, with a straight-through gradient."""
        x = x.to(self.dtype)
        if torch.is_grad_enabled() and x.requires_grad:
            rounded: Tensor = _Round.apply(x, self.scale)
            return rounded
        return _round_to_grid(x, self.scale)

    def advance(self, coupling: Coupling, previous: Tensor, current: Tensor, out: Tensor) -> Tensor:
        """Return w[k+1] for out = f(w[k]); saves nothing for backward."""
        if torch.is_grad_enabled() and any(x.requires_grad for x in (previous, current, out)):
            following: Tensor = _Advance.apply(previous, current, out, coupling, self.scale)
            return following
        return _advance(previous, current, out, coupling, self.scale)

    def pack_lost_bits(self, coupling: Coupling, previous: Tensor) -> list[Tensor]:
        """Return the bits of w[k-1] that `advance` loses, packed."""
        if not coupling.kept_bits:
            return []
        low = previous.detach().mul(self.scale).remainder_(2.0**coupling.kept_bits)
        return pack(low.to(torch.uint8), coupling.kept_bits)

    def invert(
        self,
        coupling: Coupling,
        following: Tensor,
        current: Tensor,
        out: Tensor,
        kept: Sequence[Tensor] = (),
        into: Tensor | None = None,
    ) -> Tensor:
        """Return w[k-1] from w[k+1], out = f(w[k]) and the bits that `pack_lost_bits` returned, in `into` or a new tensor."""
        total = _round_terms(current, out, coupling, self.scale, into)
        if abs(coupling.b) == 1:
            return total.div_(-self.scale).add_(following).mul_(coupling.b)
        assert coupling.kept_bits, "a coupling that is not exact"
        total.neg_().add_(following, alpha=self.scale).div_(coupling.b)
        return total.add_(unpack(kept, coupling.kept_bits, following.shape)).div_(self.scale)

    def watch(self, *states: Tensor) -> None:
        """Update the largest magnitude; the device is not synchronised before `check`."""
        if torch.compiler.is_compiling():  # `check` could not raise inside a compiled graph
            return
        for w in states:
            largest = torch.linalg.vector_norm(w.detach(), float("inf"))
            self.largest = largest if self.largest is None else torch.maximum(self.largest, largest)

    def check(self) -> None:
        """Raise RecoveryError if a watched state has left the grid, or is NaN."""
        if self.largest is None or not has_value(self.largest):
            return
        largest = float(self.largest)
        if not largest < self.limit:
            raise RecoveryError(
                f"Exact arithmetic holds states below {self.limit:g} in magnitude. Received: {largest:g}. Lower the learning "
                "rate, normalise f's output, take a coarser grid (the coupling's fraction_bits), or compute in floating point "
                "(exact=False; m or beta instead of kept_bits)."
            )


def require_exact(coupling: Coupling) -> None:
    """Raise InputError unless the coupling's inverse is exact on the grid."""
    if coupling.kept_bits is None and abs(coupling.b) != 1:
        raise InputError(
            f"Exact arithmetic needs |b| = 1, or |b| = 2^-s and the s bits kept that the product loses. Received: b = "
            f"{coupling.b:g}. Use kept_bits instead of m or beta, the additive, midpoint or leapfrog coupling, or exact=False."
        )


def has_value(x: Tensor) -> bool:
    """Return whether x holds numbers; meta and fake tensors do not."""
    return x.device.type != "meta" and not isinstance(x, FakeTensor)
