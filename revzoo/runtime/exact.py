"""Streams on a grid: the arithmetic in which an inverted chain repeats its forward bit for bit.

A float32 that is a multiple of 2^-q and smaller than 2^(24-q) in magnitude is an integer of at most 24 bits; sums and
integer multiples of such numbers are exact. So with the chain's inputs and every c * f(w) rounded to that grid, adding
and subtracting f are exact inverses of each other. The gradient passes straight through the rounding.

Source: the RevNet paper (Gomez et al. 2017, section 3.2) and Maclaurin et al. (2015) suggest fixed point for this.
"""

from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from revzoo.errors import InputError, RecoveryError
from revzoo.runtime.coupling import Coupling

# Digits after and before the point. The state of a trained network stays far below 2^8 (largest seen: 0.12 of it), and
# 2^-16 is finer than what float32 resolves for values above 2^8 anyway.
_GRIDS = {torch.float32: (16, 8), torch.float64: (32, 21)}


class _Round(torch.autograd.Function):
    """Round factor * x to multiples of 1 / scale; the gradient is that of factor * x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float, scale: float) -> Tensor:
        ctx.factor = factor
        return _rounded(x, factor, scale)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return (grads[0] if ctx.factor == 1 else grads[0] * ctx.factor), None, None


def _rounded(x: Tensor, factor: float, scale: float) -> Tensor:
    return x.mul(factor * scale).round_().div_(scale)


class Grid:
    """The grid of one forward call, with the largest magnitude seen so far.

    Args:
        dtype: of the streams: torch.float32 (steps of 2^-16, range 2^8) or torch.float64 (2^-32, 2^21).
        reach: how many times larger than the states the partial sums of a step may be; the range shrinks by it.

    Raises:
        InputError: another dtype; half precision has too few bits to hold a stream on a grid.
    """

    def __init__(self, dtype: torch.dtype, reach: float = 1.0):
        if dtype not in _GRIDS:
            raise InputError(f"exact=True needs float32 or float64 streams. Received: {dtype}. Use autocast inside f instead.")
        self.dtype = dtype
        fraction, integer = _GRIDS[dtype]
        self.scale, self.limit = 2.0**fraction, 2.0**integer / reach
        self.largest: Tensor | None = None

    def round(self, x: Tensor, factor: float = 1.0) -> Tensor:
        """Return factor * x on the grid, in the streams' dtype, with a straight-through gradient."""
        x = x.to(self.dtype)
        if torch.is_grad_enabled() and x.requires_grad:
            rounded: Tensor = _Round.apply(x, factor, self.scale)
            return rounded
        return _rounded(x, factor, self.scale)

    def watch(self, *states: Tensor) -> None:
        """Note the magnitude of states; nothing waits for the device until `check`."""
        if torch.compiler.is_compiling():  # a graph cannot raise
            return
        for w in states:
            largest = torch.linalg.vector_norm(w.detach(), float("inf"))
            self.largest = largest if self.largest is None else torch.maximum(self.largest, largest)

    def check(self) -> None:
        """Raise RecoveryError when a watched state has left the grid (or is not a number)."""
        if self.largest is None or not has_value(self.largest):
            return
        largest = float(self.largest)
        if not largest < self.limit:
            raise RecoveryError(
                f"exact=True holds states below {self.limit:g} in magnitude. Received: {largest:g}. Lower the learning "
                "rate or normalise f's output, or set exact=False."
            )


def reach(coupling: Coupling) -> float:
    """Return a bound on the partial sums of a step, in units of the largest state.

    With a = 0 every sum is a state. Else |c f| <= |w[k+1]| + |a w[k]| + |w[k-1]| is added to w[k-1] before the sum is whole.
    """
    return 1.0 if coupling.a == 0 else 3.0 + abs(coupling.a)


def require_exact(coupling: Coupling) -> None:
    """Raise InputError unless the coupling's inverse is exact on the grid."""
    if abs(coupling.b) != 1 or not float(coupling.a).is_integer():
        raise InputError(
            f"exact=True needs |b| = 1 and a whole number a, else the product loses bits. Received: a = {coupling.a:g}, "
            f"b = {coupling.b:g}. Use the additive, midpoint or leapfrog coupling, or exact=False."
        )


def has_value(x: Tensor) -> bool:
    """Return whether x has numbers to look at, which meta and fake tensors have not."""
    return x.device.type != "meta" and not isinstance(x, FakeTensor)
