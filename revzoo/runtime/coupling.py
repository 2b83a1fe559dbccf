"""The recurrence of every reversible residual network.

    w[k+1] = a * w[k] + b * w[k-1] + c * f(w[k])
    w[k-1] = (w[k+1] - a * w[k] - c * f(w[k])) / b          where b != 0

The pair (w[k-1], w[k]) is the two streams, and a coupling is the three coefficients. With a small b the chain is nearly an
ordinary residual network, and nearly impossible to invert in floating point. With `kept_bits` its inverse is exact
(`exact.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from numbers import Real
from typing import Any, ClassVar

import torch
from torch import Tensor

from revzoo.bounds import MOST_KEPT_BITS, FiniteFloat, FractionBits, KeptBits, NonZeroFloat, Rate, Sign, StepSize
from revzoo.device import is_sharded
from revzoo.errors import InputError, PartArgumentError
from revzoo.registry import couplings

Pair = tuple[Tensor, Tensor]  # (w[k-1], w[k])


@dataclass(frozen=True)
class Coupling:
    """Coefficients of one step of the recurrence.

    Args:
        a: weight of the current state. Where a = 0 the two streams may differ in shape.
        b: weight of the state before it. Each inverted step multiplies the rounding error by 1 / |b|. With b = 0 the step
            forgets the older stream and can be run in every mode but `invert`.
        c: weight of f, not 0.
        kept_bits: s, where |b| = 2^-s. The streams are then on a grid, the s bits of each element that the product with b
            loses are kept until backward, and inversion is exact. None: floating point, unless the chain is `exact`.
        fraction_bits: binary digits after the point on that grid; None is 16 for float32, 32 for float64. Fewer allow larger
            states.

    Raises:
        InputError: a coefficient is no finite number, c is 0, or |b| is not 2^-kept_bits.
    """

    a: float
    b: float
    c: float
    kept_bits: int | None = None
    fraction_bits: int | None = None
    sign: ClassVar[Tensor | None] = None  # of `RandomSign`, in one step of one forward
    # The sum as `advance` computes it: places in (w[k-1], w[k], f(w[k])), with their weights.
    _terms: list[tuple[int, float]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        coefficients = (self.a, self.b, self.c)
        if not all(isinstance(s, Real) and isfinite(s) for s in coefficients):
            raise InputError(f"The coefficients a, b, c of a coupling are finite numbers. Received: {coefficients}.")
        if self.c == 0:
            raise InputError("A coupling with c = 0 leaves f out: choose c != 0.")
        if self.kept_bits is not None and (not 0 <= self.kept_bits <= MOST_KEPT_BITS or abs(self.b) != 2.0**-self.kept_bits):
            raise InputError(
                f"Bits are kept for |b| = 2^-kept_bits, kept_bits from 0 to {MOST_KEPT_BITS}. Received: b = {self.b:g} and "
                f"kept_bits = {self.kept_bits}."
            )
        terms = [(place, weight) for place, weight in enumerate((self.b, self.a, self.c)) if weight != 0]
        terms.sort(key=lambda term: term[1] != 1)  # a first term that needs no scaling saves an operation
        object.__setattr__(self, "_terms", terms)

    @property
    def is_exact(self) -> bool:
        """Whether inversion is exact in every chain, because the bits that b loses are kept."""
        return self.kept_bits is not None

    @property
    def in_evaluation(self) -> "Coupling":
        """The coupling of a network in evaluation: here the same."""
        return self

    @property
    def with_residual(self) -> "Coupling":
        """The coupling which makes of f(w[k]) - w[k] what this one makes of f(w[k])."""
        return replace(self, a=self.a + self.c)

    @property
    def unsigned(self) -> tuple[float, float, float]:
        """Weights of w[k-1], w[k] and f(w[k]): b, a and c, of which a sign is to make those of each example."""
        return self.b, self.a, self.c

    @property
    def weights(self) -> tuple[Any, Any, Any]:
        """Weights of w[k-1], w[k] and f(w[k]), as numbers or for each example."""
        return self.b, self.a, self.c

    def require_exact(self) -> None:
        """Raise InputError unless the inverse is exact on a grid."""
        if self.kept_bits is None and abs(self.b) != 1:
            raise InputError(
                f"Exact arithmetic needs |b| = 1, or |b| = 2^-s and the s bits kept that the product loses. Received: b = "
                f"{self.b:g}. Use kept_bits instead of m or beta, the additive, midpoint or leapfrog coupling, or exact=False."
            )

    def bind(self, pair: Pair) -> "Coupling":
        """Return the coupling of one step of one forward: here the same for all.

        A subclass may return one whose `advance` and `invert` have coefficients for each example; `advance` must save nothing
        for backward. The subclass's own `b` must be the smallest of these in magnitude. The step's update holds the returned
        coupling until backward. `chain.inverse` and steps on a grid refuse such a
        subclass, except `RandomSign`.
        """
        return self

    def advance(self, previous: Tensor, current: Tensor, out: Tensor) -> Tensor:
        """Return w[k+1] for out = f(w[k]); saves nothing for backward."""
        states = (previous, current, out)
        (first, scale), *others = self._terms
        total = states[first]
        if scale != 1:
            total = torch.add(total, total, alpha=scale - 1)  # a product would save its scalar for backward
        for place, scale in others:
            total = total + states[place] if scale == 1 else torch.add(total, states[place], alpha=scale)
        return total

    def invert(self, following: Tensor, current: Tensor, out: Tensor, into: Tensor | None = None) -> Tensor:
        """Return w[k-1] for following = w[k+1] and out = f(w[k]), written into `into` or a new tensor."""
        total = following - out if self.c == 1 and into is None else torch.sub(following, out, alpha=self.c, out=into)
        if self.a != 0:
            total.sub_(current, alpha=self.a)
        if self.b != 1:
            total.div_(self.b)
        return total


@dataclass(frozen=True)
class RandomSign(Coupling):
    """Momentum of either sign in training, and none in evaluation.

        w[k+1] = ordinary(w[k]) + g (w[k-1] - w[k])        g is b or -b in training, and 0 in evaluation

    The sign is drawn in every forward, for each example and step: each place along dimension 0 of the states. It comes from
    torch's generator of their device, in every mode alike, and is kept until backward.

    Args:
        a: of the momentum with the sign 1.
        b: of the same.
        c: of the same.
        kept_bits: as for every coupling, but not None.
        fraction_bits: as for every coupling.
        ordinary: the coupling in evaluation, whose b is 0.
        sign: 1 or -1 for each example, int8, in a coupling that `bind` returned.
    Source: BDIA (Zhang et al. 2024, arXiv:2407.09093): the random sign, and one kept bit. Its weights, of (1 + g) f(w[k]), are
        others.
    """

    ordinary: Coupling = field(kw_only=True)
    sign: Tensor | None = field(default=None, repr=False, compare=False)  # type: ignore[misc]

    @property
    def in_evaluation(self) -> Coupling:
        return self.ordinary

    @property
    def with_residual(self) -> Coupling:
        return replace(self, a=self.a + self.c, ordinary=self.ordinary.with_residual)

    @property
    def unsigned(self) -> tuple[float, float, float]:
        return (self.b, self.a, self.c) if self.sign is None else (self.b, self.ordinary.a, self.ordinary.c)

    @property
    def weights(self) -> tuple[Any, Any, Any]:
        return give_sign(self.unsigned, self.sign)

    @property
    def on_grid(self) -> Coupling:
        """The ordinary step on the grid, nearly: as many bits are kept as can be. It shows what the grid itself changes."""
        b = 2.0**-MOST_KEPT_BITS
        return Coupling(self.ordinary.a + b, -b, self.c, MOST_KEPT_BITS, self.fraction_bits)

    def bind(self, pair: Pair) -> Coupling:
        state = pair[1]
        if is_sharded(state) or state.is_nested:
            raise InputError(
                f"A random sign is drawn for each example of a dense tensor. Received: states of {type(state).__name__}"
                f"{' with ragged examples' if state.is_nested else ''}. Use sign='fixed' with more kept_bits."
            )
        sign = torch.randint(0, 2, (*state.shape[:1], *[1] * (state.dim() - 1)), dtype=torch.int8, device=state.device)
        return replace(self, sign=sign * 2 - 1)


def give_sign(unsigned: Sequence[float], sign: Tensor | None) -> tuple[Any, ...]:
    """Return the weights of each example, whose momentum has a sign; without signs those that are given."""
    if sign is None:
        return tuple(unsigned)
    b, a, c = unsigned
    signed = sign * b
    return signed, a - signed, c


@couplings.register("additive")
def additive() -> Coupling:
    """Return w[k+1] = w[k-1] + f(w[k]).

    Source: RevNet (Gomez et al. 2017), equations 6 to 8: F and G of a block are two consecutive steps.
    """
    return Coupling(0.0, 1.0, 1.0)


@couplings.register("none")
def none() -> Coupling:
    """Return w[k+1] = f(w[k]): an ordinary network. Nothing but the layers of f themselves can be inverted.

    Source: ordinary networks; the layer-wise network of Hascoet et al. 2023, section 4.3.
    """
    return Coupling(0.0, 0.0, 1.0)


@couplings.register("momentum")
def momentum(
    *,
    m: Rate | None = None,
    gain: NonZeroFloat | None = None,
    residual: bool = True,
    kept_bits: KeptBits | None = None,
    fraction_bits: FractionBits | None = None,
    sign: Sign = "fixed",
) -> Coupling:
    """Return w[k+1] = w[k] + m (w[k] - w[k-1]) + gain f(w[k]).

    With gain 1, m = 0 is the ordinary residual network.

    Args:
        m: momentum, in [0, 1); 0.9 if neither it nor kept_bits is given.
        gain: weight of f; None is 1 - m, as published.
        residual: whether w[k] is a term of its own. False if f contains its own residual, as in post-norm transformers: then
            f(w[k]) - w[k] takes the place of f(w[k]).
        kept_bits: s from 0 to 15, instead of m: then m = 2^-s, and the bits it loses are kept, so that inversion is exact.
        fraction_bits: with kept_bits, binary digits after the point (16 in float32 by default); states stay below
            2^(24 - fraction_bits).
        sign: "random", with kept_bits: m or -m in training, drawn for each example and step, and m = 0 in evaluation.
    Source: Momentum ResNets (Sander et al. 2021), equation 4, velocity eliminated; there gain is 1 - m. `residual=False`
        is momentumnet's `is_residual=False`. Bits kept as in Maclaurin et al. (2015), for powers of two.
    """
    m = _resolve_weight("m", m, kept_bits, 0.9)
    gain = 1.0 - m if gain is None else gain
    rest = 1.0 if residual else 1.0 - gain
    if sign == "fixed":
        return Coupling(m + rest, -m, gain, kept_bits, fraction_bits)
    if kept_bits is None:
        raise PartArgumentError("sign", sign, "fixed, or kept_bits instead of m: only exact arithmetic can undo it")
    return RandomSign(m + rest, -m, gain, kept_bits, fraction_bits, ordinary=Coupling(rest, 0.0, gain))


@couplings.register("dual_residual")
def dual_residual(
    *,
    alpha: FiniteFloat = 1.0,
    beta: FiniteFloat | None = None,
    kept_bits: KeptBits | None = None,
    fraction_bits: FractionBits | None = None,
) -> Coupling:
    """Return w[k+1] = alpha w[k] + beta w[k-1] + f(w[k]).

    Args:
        alpha: weight of w[k]: 1 for a residual network, 0 if f contains its own residual.
        beta: weight of w[k-1]; 0.1 if neither it nor kept_bits is given.
        kept_bits: s from 0 to 15, instead of beta: then beta = 2^-s, and the bits it loses are kept, so that inversion is
            exact.
        fraction_bits: with kept_bits, binary digits after the point (16 in float32 by default); states stay below
            2^(24 - fraction_bits).
    Source: Dr2Net (Zhao et al. 2024); alpha = 1 and beta -> 0 is the ordinary residual network.
    """
    return Coupling(alpha, _resolve_weight("beta", beta, kept_bits, 0.1), 1.0, kept_bits, fraction_bits)


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


def _resolve_weight(name: str, value: float | None, kept_bits: int | None, default: float) -> float:
    """Return the weight that was given, or the one that kept_bits implies, or the default."""
    if value is not None and kept_bits is not None:
        raise PartArgumentError("kept_bits", kept_bits, f"null when {name} is given: kept_bits determines {name}")
    if kept_bits is not None:
        return 2.0**-kept_bits
    return default if value is None else value
