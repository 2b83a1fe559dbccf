"""Exact arithmetic: streams on a grid, on which inversion rebuilds every state bit for bit.

A float32 that is a multiple of 2^-q and smaller than 2^(24-q) in magnitude is an integer of at most 24 bits, scaled. Sums and
integer multiples of such numbers are exact. So with the chain's inputs on that grid, W = w * 2^q, and

    forward     R = round(c f(w) + a w)     W[k+1] = R + sign(b) (W[k-1] >> s)          |b| = 2^-s
    inverse                                 W[k-1] = sign(b) (W[k+1] - R) << s | kept

are exact inverses of each other: R is the same number both times, and the s lowest bits of W[k-1], which the shift loses, are
kept (none with s = 0). The gradient ignores the rounding: it is that of the recurrence (straight-through). No state holds -0.0,
because w + x - x is 0.0 for w = -0.0, and an f may see the difference (atan2, copysign, 1 / w).

Source: the RevNet paper (Gomez et al. 2017, section 3.2) and Maclaurin et al. (2015) suggest fixed point for this, and the
latter a buffer of lost bits; momentumnet (Sander et al. 2021) has one for any rational b. For a power of two,
a shift is enough.
"""

from collections.abc import Sequence
from functools import partial
from math import frexp
from typing import Any, cast

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from revzoo.errors import InputError, RecoveryError
from revzoo.runtime.bits import PackedBits, pack, unpack
from revzoo.runtime.coupling import Coupling
from revzoo.runtime.host_copy import can_read_now
from revzoo.runtime.late_check import LateCheck
from revzoo.runtime.replay import is_sharded

# Binary digits after the point, and in total. The states of trained networks stay far below 2^8 (the largest seen is 0.12 of
# it), and for values above 2^8 float32 itself is coarser than 2^-16.
_GRIDS = {torch.float32: (16, 24), torch.float64: (32, 53)}
_INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}

LostBits = PackedBits | Tensor | None  # those of a DTensor are not packed


class _Round(torch.autograd.Function):
    """Round x to multiples of 1 / scale; the gradient is that of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        return _round_to_grid(x, scale).detach()  # Dynamo of PyTorch 2.11 would differentiate the rounding itself

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _Advance(torch.autograd.Function):
    """One step of the recurrence on the grid; its gradient is that of the recurrence without rounding."""

    @staticmethod
    def forward(ctx: Any, previous: Tensor, current: Tensor, out: Tensor, coupling: Coupling, scale: float) -> Tensor:
        ctx.coupling = coupling
        return _advance(previous, current, out, coupling, scale).detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        factors = (ctx.coupling.b, ctx.coupling.a, ctx.coupling.c)
        return *(None if s == 0 else grads[0] if s == 1 else grads[0] * s for s in factors), None, None


def _round_to_grid(x: Tensor, scale: float) -> Tensor:
    return x.mul(scale).round_().mul_(1 / scale).add_(0.0)  # the sum turns -0.0 into 0.0


def _round_terms(current: Tensor, out: Tensor, coupling: Coupling, scale: float, into: Tensor | None = None) -> Tensor:
    """Return R as integers."""
    total = torch.mul(out.to(current.dtype), coupling.c * scale, out=into)
    if _is_power_of_two(coupling.a):
        total.add_(current, alpha=coupling.a * scale)
    elif coupling.a:  # not in one operation: a fused multiply-add may round differently when recomputed
        total.add_(current.mul(coupling.a * scale))
    total.round_()
    return total if coupling.b > 0 else total.add_(0.0)  # -0.0 - 0.0 would be -0.0


def _advance(previous: Tensor, current: Tensor, out: Tensor, coupling: Coupling, scale: float) -> Tensor:
    total = _round_terms(current, out, coupling, scale)
    if abs(coupling.b) == 1:
        return total.mul_(1 / scale).add_(previous, alpha=coupling.b)
    sign = 1 if coupling.b > 0 else -1
    return total.add_(previous.mul(abs(coupling.b) * scale).floor_(), alpha=sign).mul_(1 / scale)


def _is_power_of_two(x: float) -> bool:
    """Return whether products with x are exact, and with them a fused multiply-add."""
    return frexp(abs(x))[0] == 0.5


class Grid:
    """The grid of one forward call, and a watch on the range of its states.

    Args:
        dtype: dtype of the streams: torch.float32 (multiples of 2^-16 below 2^8) or torch.float64 (2^-32, 2^21).
        fraction_bits: binary digits after the point, instead of 16 or 32. Fewer allow larger states.
        will_invert: whether backward rebuilds states of this call.

    Raises:
        InputError: another dtype; half precision has too few bits to hold a stream on a grid.
    """

    def __init__(self, dtype: torch.dtype, fraction_bits: int | None = None, will_invert: bool = False):
        if dtype not in _GRIDS:
            raise InputError(
                f"Exact arithmetic (exact=True, kept_bits) needs float32 or float64 streams. Received: {dtype}. Use autocast."
            )
        self.dtype = dtype
        fraction, digits = _GRIDS[dtype]
        fraction = fraction if fraction_bits is None else fraction_bits
        self.scale, self.limit = 2.0**fraction, 2.0 ** (digits - fraction)
        self._will_invert = will_invert
        self._places: list[str] = []
        self._ranges: list[Tensor] = []  # least and most value of the states at these places, on an accelerator
        self._late_check: LateCheck | None = None

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
            current = current if coupling.a else current.detach()  # compiled autograd cannot add a gradient that is None
            following: Tensor = _Advance.apply(previous, current, out, coupling, self.scale)
            return following
        return _advance(previous, current, out, coupling, self.scale)

    def pack_lost_bits(self, coupling: Coupling, previous: Tensor) -> LostBits:
        """Return the bits of w[k-1] that `advance` loses, packed; None if it loses none."""
        if not coupling.kept_bits:
            return None
        low = previous.detach().mul(self.scale).to(_INTEGERS[self.dtype]).bitwise_and_(2**coupling.kept_bits - 1)
        low = low.to(torch.uint8)
        return low if is_sharded(low) else pack(low, coupling.kept_bits)  # a flattened DTensor would change its sharding

    def invert(
        self,
        coupling: Coupling,
        following: Tensor,
        current: Tensor,
        out: Tensor,
        kept: LostBits = None,
        into: Tensor | None = None,
    ) -> Tensor:
        """Return w[k-1] from w[k+1], out = f(w[k]) and the bits that `pack_lost_bits` returned, in `into` or a new tensor."""
        if self._late_check is not None:
            self._late_check.run_after_backward()
        total = _round_terms(current, out, coupling, self.scale, into)
        total.mul_(-1 / (coupling.b * self.scale)).add_(following, alpha=1 / coupling.b)
        if coupling.kept_bits:
            assert kept is not None, "the bits have been used already"
            total.add_(kept if isinstance(kept, Tensor) else unpack(kept), alpha=1 / self.scale)
        return total

    def watch(self, state: Tensor, where: str) -> None:
        """Raise RecoveryError if a state has left the grid, or is NaN; on an accelerator in backward, which rebuilds it.

        Args:
            state: the state; on a CPU its range is looked at now.
            where: words for the message that say which state it is.
        """
        if torch.compiler.is_compiling() or state.numel() == 0:  # nothing can be raised inside a compiled graph
            return
        state = _get_local(state.detach())
        if can_read_now(state.device):
            least, most = state.amin(), state.amax()  # torch.aminmax takes 9 times as long on channels-last tensors
            if has_value(state):
                _check_range(self.limit, [where], [float(least), float(most)])
        elif self._will_invert:
            self._places.append(where)
            self._ranges += state.amin(), state.amax()

    def end_forward(self) -> None:
        """Start copying what `watch` has noted on an accelerator."""
        if self._ranges and has_value(self._ranges[0]):
            self._late_check = LateCheck(torch.stack(self._ranges), partial(_check_range, self.limit, self._places))
        self._ranges = []


def _check_range(limit: float, places: Sequence[str], ranges: Sequence[float]) -> None:
    """Raise RecoveryError at the first place whose least and most value, in turn in `ranges`, are not within the limit."""
    for where, least, most in zip(places, ranges[::2], ranges[1::2], strict=True):
        if not (-limit < least and most < limit):
            largest = most if most >= -least else least
            raise RecoveryError(
                f"Exact arithmetic holds states below {limit:g} in magnitude. Received: {largest:g} {where}. Lower the "
                "learning rate, normalise f's output, take a coarser grid (the coupling's fraction_bits), or compute in "
                "floating point (exact=False; m or beta instead of kept_bits)."
            )


def _get_local(x: Tensor) -> Tensor:
    """Return this rank's part of a DTensor: each rank answers for its own."""
    return cast(Any, x).to_local() if is_sharded(x) else x


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
