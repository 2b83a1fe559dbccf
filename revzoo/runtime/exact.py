"""Exact arithmetic: streams on a grid, on which inversion rebuilds every state bit for bit.

A float32 that is a multiple of 2^-q and smaller than 2^(24-q) in magnitude is an integer of at most 24 bits, scaled. Sums and
integer multiples of such numbers are exact. So with the chain's inputs on that grid, W = w * 2^q, and

    forward     R = round(c f(w) + a w)     W[k+1] = R + sign(b) (W[k-1] >> s)          |b| = 2^-s
    inverse                                 W[k-1] = sign(b) (W[k+1] - R) << s | kept

are exact inverses of each other: R is the same number both times, and the s lowest bits of W[k-1], which the shift loses, are
kept (none with s = 0). With random signs, sign(b) and a are each example's own. The gradient ignores the rounding: it is that
of the recurrence (straight-through). No state holds -0.0, because w + x - x is 0.0 for w = -0.0, and an f may see the
difference (atan2, copysign, 1 / w).

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

from revzoo.device import can_read_now, check_after_backward, has_value, is_capturing, is_sharded
from revzoo.errors import InputError, RecoveryError
from revzoo.runtime import seams
from revzoo.runtime.bits import PackedBits, choose_dtype, pack, unpack
from revzoo.runtime.coupling import Coupling, give_sign
from revzoo.runtime.nested import wraps_tensors

# Binary digits after the point, and in total. The states of trained networks stay far below 2^8 (the largest seen is 0.12 of
# it), and for values above 2^8 float32 itself is coarser than 2^-16.
GRIDS = {torch.float32: (16, 24), torch.float64: (32, 53)}
_INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}

LostBits = PackedBits | Tensor | None


class _StraightThrough(torch.autograd.Function):
    """Return a value computed elsewhere; its gradient is that of the sum of inputs times weights.

    Signs are given them when they are needed.
    """

    @staticmethod
    def forward(ctx: Any, value: Tensor, weights: Sequence[float], sign: Tensor | None, *inputs: Tensor) -> Tensor:
        ctx.weights, ctx.sign = weights, sign
        return value.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, *(scale_gradient(grads[0], weight) for weight in give_sign(ctx.weights, ctx.sign))


def scale_gradient(gradient: Tensor, weight: float | Tensor) -> Tensor | None:
    """Return the gradient times a weight; None for 0."""
    if isinstance(weight, Tensor):
        return gradient * weight
    return None if weight == 0 else gradient if weight == 1 else gradient * weight


def attach_graph(value: Tensor, weights: Sequence[float], *inputs: Tensor, sign: Tensor | None = None) -> Tensor:
    """Return a value, differentiated as the sum of inputs times weights, those of a coupling if each example has a sign."""
    if not (torch.is_grad_enabled() and any(x.requires_grad for x in inputs)):
        return value
    if sign is None:
        # Compiled autograd cannot add a gradient that is None.
        inputs = tuple(x if s else x.detach() for x, s in zip(inputs, weights, strict=True))
    return _StraightThrough.apply(value, weights, sign, *inputs)


def _round_to_grid(x: Tensor, scale: float) -> Tensor:
    return without_negative_zeros(x.mul(scale).round_().mul_(1 / scale))


def _round_terms(current: Tensor, out: Tensor, coupling: Coupling, scale: float, into: Tensor | None = None) -> Tensor:
    """Return R as floating-point numbers, which may be -0.0, in `into` or a new tensor with the strides of out.

    A product and a sum are one operation only where the product is exact: elsewhere a fused multiply-add may round differently
    when recomputed.
    """
    _, a, c = coupling.unsigned
    out, a, c = out.to(current.dtype), a * scale, c * scale
    if a and _is_power_of_two(c):
        into = _reuse(torch.empty_like(out)) if into is None else into
        total = torch.mul(current, a, out=into).add_(out, alpha=c)
    else:
        total = torch.mul(out, c, out=into)
        if a:
            total.add_(current, alpha=a) if _is_power_of_two(a) else total.add_(current.mul(a))
    if coupling.sign is not None:
        total.addcmul_(current, coupling.sign, value=-coupling.b * scale)
    return total.round_()


def without_negative_zeros(x: Tensor) -> Tensor:
    """Return x with 0.0 in place of -0.0, in the same memory if nothing is compiled: compilers remove the addition of 0.0."""
    return torch.where(x == 0, 0.0, x) if torch.compiler.is_compiling() else x.add_(0.0)


def _is_power_of_two(x: float) -> bool:
    """Return whether products with x are exact, and with them a fused multiply-add."""
    return frexp(abs(x))[0] == 0.5


def _reuse(x: Tensor) -> Tensor | None:
    """Return x as the `out=` of an operation, or None where its result has to be a new tensor.

    Operands that wrap tensors, as DTensors do, may be laid out differently. In compiled code nothing is gained, and `out=` is
    not taken for all strides.
    """
    return None if torch.compiler.is_compiling() or wraps_tensors(type(x)) else x


def _advance(
    previous: Tensor, current: Tensor, out: Tensor, coupling: Coupling, scale: float, limit: float, keeps_bits: bool
) -> tuple[Tensor, LostBits]:
    b, sign = coupling.b, coupling.sign
    total = _round_terms(current, out, coupling, scale)
    if b == 1 and sign is None:
        return torch.add(previous, total, alpha=1 / scale, out=_reuse(total)), None
    if b < 0 or sign is not None:
        total = without_negative_zeros(total)  # -0.0 - 0.0 would be -0.0
    if b == -1 and sign is None:
        return total.mul_(1 / scale).sub_(previous), None
    high, side = previous.mul(abs(b) * scale).floor_(), 1 if b > 0 else -1
    total = total.add_(high, alpha=side) if sign is None else total.addcmul_(high, sign, value=side)
    total.mul_(1 / scale)
    if not (keeps_bits and coupling.kept_bits):
        return total, None
    low = torch.sub(previous, high, alpha=1 / (abs(b) * scale), out=_reuse(high))
    # Numbers from limit / 2 to limit have a spacing of 1 / scale: the bits are now the last ones of the significand.
    count = coupling.kept_bits
    bits = _get_values(low.add_(limit / 2)).view(_INTEGERS[low.dtype]).to(choose_dtype(count))
    return total, pack(bits, count)


def _invert(
    following: Tensor, current: Tensor, out: Tensor, kept: LostBits, into: Tensor | None, coupling: Coupling, scale: float
) -> Tensor:
    if into is not None and _reuse(into) is None:
        return into.copy_(_invert(following, current, out, kept, None, coupling, scale))
    total = _round_terms(current, out, coupling, scale, into)
    total, b, sign = torch.sub(following, total, alpha=1 / scale, out=_reuse(total)), coupling.b, coupling.sign
    if b == 1 and sign is None:
        return total
    total.mul_(1 / b if sign is None else sign / b)
    if not coupling.kept_bits:
        return without_negative_zeros(total)
    assert kept is not None, "the bits have been used already"
    _get_values(total).add_(unpack(kept), alpha=1 / scale)
    return total


def _get_values(x: Tensor) -> Tensor:
    """Return x, or the memory of a jagged nested tensor, which cannot be viewed as integers."""
    return x.values() if x.is_nested else x


class Grid:
    """The grid of one forward call, and a watch on the range of its states.

    Args:
        dtype: dtype of the streams: torch.float32 (multiples of 2^-16 below 2^8) or torch.float64 (2^-32, 2^21).
        fraction_bits: binary digits after the point, instead of 16 or 32. Fewer allow larger states.
        will_invert: whether backward rebuilds states of this call.
        remedy: what to do if a state leaves the grid, in words that follow "Lower the learning rate, or".

    Raises:
        InputError: another dtype; half precision has too few bits to hold a stream on a grid.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        fraction_bits: int | None = None,
        will_invert: bool = False,
        remedy: str = "normalise f's output",
    ):
        if dtype not in GRIDS:
            raise InputError(
                f"Exact arithmetic (exact=True, kept_bits) needs float32 or float64 streams. Received: {dtype}. Use autocast."
            )
        self.dtype = dtype
        fraction, digits = GRIDS[dtype]
        fraction = fraction if fraction_bits is None else fraction_bits
        self.scale, self.limit = 2.0**fraction, 2.0 ** (digits - fraction)
        self._will_invert = will_invert
        self._remedy = remedy
        # On an accelerator, of states that have not been checked: where each is, and its least and most value.
        self._noted: list[tuple[str, Tensor, Tensor]] = []
        self._checked_in: int | None = None  # the latest backward that has begun to check them

    def round(self, x: Tensor) -> Tensor:
        """Return x on the grid, in the streams' dtype, with a straight-through gradient."""
        x = x.to(self.dtype)
        rounded = _round_to_grid(x.detach(), self.scale)
        return attach_graph(rounded, (1.0,), x)

    def advance(
        self, coupling: Coupling, previous: Tensor, current: Tensor, out: Tensor, *, keeps_bits: bool = False
    ) -> tuple[Tensor, LostBits]:
        """Return w[k+1] for out = f(w[k]), and what `invert` needs besides; saves nothing for backward.

        Args:
            coupling: the coupling of the step.
            previous: w[k-1].
            current: w[k].
            out: f(w[k]).
            keeps_bits: whether to return the bits of w[k-1] that the coupling loses, packed, if there are any.
        """
        following, bits = _advance(
            previous.detach(), current.detach(), out.detach(), coupling, self.scale, self.limit, keeps_bits
        )
        return attach_graph(following, coupling.unsigned, previous, current, out, sign=coupling.sign), bits

    def invert(
        self,
        coupling: Coupling,
        following: Tensor,
        current: Tensor,
        out: Tensor,
        kept: LostBits = None,
        into: Tensor | None = None,
    ) -> Tensor:
        """Return w[k-1] from w[k+1], out = f(w[k]) and the bits that `advance` returned, in `into` or a new tensor."""
        poison = self._begin_check()
        rebuilt = _invert(following, current, out, kept, into, coupling, self.scale)
        return rebuilt if poison is None else rebuilt.add_(poison)

    def _begin_check(self) -> Tensor | None:
        """Have what `watch` has noted on an accelerator checked at the end of this backward.

        Returns:
            None; in a CUDA graph, where nothing can be raised, a number to add to a state: 0, or NaN if a state has left the
            grid, so that no gradient that could be wrong looks right.
        """
        if not self._noted or not has_value(self._noted[0][1]):
            return None
        if (task := torch._C._current_graph_task_id()) == self._checked_in:
            return None
        self._checked_in = task
        noted = list(self._noted)  # it holds the tensors until they are checked: a side stream may be reading them
        ranges = torch.stack([value for _, *values in noted for value in values])
        if is_capturing():
            return torch.where(ranges.abs().amax() < self.limit, 0.0, torch.nan)
        check_after_backward(ranges, partial(self._end_check, noted))
        return None

    def _end_check(self, noted: Sequence[tuple[str, Tensor, Tensor]], ranges: list[float]) -> None:
        self._check_range([place for place, *_ in noted], ranges)
        checked = set(map(id, noted))  # a forward may have gone on after the backward had begun, and noted more
        self._noted = [each for each in self._noted if id(each) not in checked]

    def watch(self, state: Tensor, where: str) -> None:
        """Raise RecoveryError if a state has left the grid, or is NaN; on an accelerator in backward, which rebuilds it.

        Args:
            state: the state; on a CPU its range is looked at now.
            where: words for the message that say which state it is.
        """
        if torch.compiler.is_compiling() or state.numel() == 0:  # nothing can be raised inside a compiled graph
            return
        state = _get_local(state.detach())
        if can_read_now(state):
            least, most = state.amin(), state.amax()  # torch.aminmax takes 9 times as long on channels-last tensors
            if has_value(state):
                self._check_range([where], [float(least), float(most)])
        elif self._will_invert:
            self._noted.append((where, *state.aminmax()))

    def _check_range(self, places: Sequence[str], ranges: Sequence[float]) -> None:
        """Raise RecoveryError at the first place with values beyond the limit, of the least and most value of each."""
        for where, least, most in zip(places, ranges[::2], ranges[1::2], strict=True):
            if not (-self.limit < least and most < self.limit):
                largest = most if most >= -least else least
                raise RecoveryError(
                    f"Exact arithmetic holds states below {self.limit:g} in magnitude. Received: {largest:g} {where}. Lower "
                    f"the learning rate, or {self._remedy}."
                )


def _get_local(x: Tensor) -> Tensor:
    """Return this rank's part of a DTensor: each rank answers for its own."""
    return cast(Any, x).to_local() if is_sharded(x) else x


seams.make_grid = Grid
