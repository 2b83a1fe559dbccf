"""The one recurrence behind every reversible residual network.

    w[k+1] = a * w[k] + b * w[k-1] + c * f(w[k])            b != 0
    w[k-1] = (w[k+1] - a * w[k] - c * f(w[k])) / b

The pair (w[k-1], w[k]) is the two streams. A coupling is the three coefficients; everything else is the chain's.
"""

from dataclasses import dataclass
from math import isfinite
from numbers import Real

import torch
from torch import Tensor

from revzoo.bounds import Finite, NonZero, Share, StepSize
from revzoo.errors import InputError
from revzoo.registry import couplings


@dataclass(frozen=True)
class Coupling:
    """Coefficients of one step of the recurrence.

    Args:
        a: weight of the current state. Where a = 0 the two streams may differ in shape.
        b: weight of the state before it, not 0. Each inverted step multiplies the rounding error by 1 / |b|.
        c: weight of f, not 0.

    Raises:
        InputError: a coefficient is no finite number, c is 0, or b is 0: the step would forget the older stream and could
            not be inverted.
    """

    a: float
    b: float
    c: float

    def __post_init__(self) -> None:
        coefficients = (self.a, self.b, self.c)
        if not all(isinstance(s, Real) and isfinite(s) for s in coefficients):
            raise InputError(f"The coefficients a, b, c of a coupling are finite numbers. Received: {coefficients}.")
        if self.c == 0:
            raise InputError("A coupling with c = 0 leaves f out: choose c != 0.")
        if self.b == 0:
            raise InputError("A coupling with b = 0 cannot be inverted: choose b != 0, or run the step outside the chain.")

    def advance(self, previous: Tensor, current: Tensor, out: Tensor) -> Tensor:
        """Return w[k+1] for out = f(w[k]); saves nothing for backward."""
        terms = [(w, s) for w, s in ((previous, self.b), (current, self.a), (out, self.c)) if s != 0]
        terms.sort(key=lambda term: term[1] != 1)  # begin with a term that needs no scaling
        total, scale = terms[0]
        if scale != 1:
            total = torch.add(total, total, alpha=scale - 1)  # unlike a product, a sum keeps no scalar for backward
        for w, scale in terms[1:]:
            total = torch.add(total, w, alpha=scale)
        return total

    def retreat(self, following: Tensor, current: Tensor, out: Tensor) -> Tensor:
        """Return w[k-1] for following = w[k+1] and out = f(w[k]); allocates one stream."""
        total = torch.sub(following, out, alpha=self.c)
        if self.a != 0:
            total.sub_(current, alpha=self.a)
        if self.b != 1:
            total.div_(self.b)
        return total


@couplings.register("additive")
def additive() -> Coupling:
    """Return w[k+1] = w[k-1] + f(w[k]).

    Source: RevNet (Gomez et al. 2017), equations 6 to 8: F and G of a block are two consecutive steps.
    """
    return Coupling(0.0, 1.0, 1.0)


@couplings.register("momentum")
def momentum(*, m: Share = 0.9) -> Coupling:
    """Return w[k+1] = w[k] + m (w[k] - w[k-1]) + (1 - m) f(w[k]).

    Source: Momentum ResNets (Sander et al. 2021), equation 4, velocity eliminated.
    """
    return Coupling(1.0 + m, -m, 1.0 - m)


@couplings.register("dual_residual")
def dual_residual(*, alpha: Finite = 1.0, beta: NonZero = 0.1) -> Coupling:
    """Return w[k+1] = alpha w[k] + beta w[k-1] + f(w[k]).

    Source: Dr2Net (Zhao et al. 2024); alpha = 1 and beta -> 0 is the ordinary residual network.
    """
    return Coupling(alpha, beta, 1.0)


@couplings.register("midpoint")
def midpoint(*, h: StepSize = 0.5) -> Coupling:
    """Return w[k+1] = w[k-1] + 2 h f(w[k]).

    Source: Chang et al. 2018, "Reversible architectures for arbitrarily deep residual neural networks", section 3.
    """
    return Coupling(0.0, 1.0, 2.0 * h)


@couplings.register("leapfrog")
def leapfrog(*, h: StepSize = 1.0) -> Coupling:
    """Return w[k+1] = 2 w[k] - w[k-1] - h^2 f(w[k]).

    Source: Chang et al. 2018, section 3, the second-order network.
    """
    return Coupling(2.0, -1.0, -h * h)
