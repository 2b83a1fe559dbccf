"""Ranges of numbers, which a spec, a recipe and the signatures of parts declare in their annotations."""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf, isfinite
from typing import Annotated, Any


@dataclass(frozen=True)
class Bound:
    """A range, as a mark inside `Annotated`: `Annotated[int, Bound("an integer >= 1", lambda n: n >= 1)]`."""

    allowed: str
    holds: Callable[[Any], object]


Positive = Annotated[int, Bound("an integer >= 1", lambda n: n >= 1)]
Rate = Annotated[float, Bound("a number in [0, 1)", lambda p: 0 <= p < 1)]
Update = Annotated[float, Bound("a number in (0, 1]", lambda p: 0 < p <= 1)]
Fraction = Annotated[int, Bound("an integer from 4 to 16", lambda n: 4 <= n <= 16)]
Bits = Annotated[int, Bound("an integer from 0 to 8", lambda n: 0 <= n <= 8)]
Extent = Annotated[float, Bound("a finite number > 0", lambda x: 0 < x < inf)]
Finite = Annotated[float, Bound("a finite number", isfinite)]
NonZero = Annotated[float, Bound("a finite number other than 0", lambda x: isfinite(x) and x != 0)]
StepSize = Annotated[float, Bound("a number whose square is finite and not 0", lambda h: 0 < h * h < inf)]
