"""Types of options: numbers with a range, and names, used by specs, recipes and the signatures of parts."""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf, isfinite
from typing import Annotated, Any, Literal


@dataclass(frozen=True)
class Bound:
    """Metadata of an `Annotated` type that restricts its values: `Annotated[int, Bound("an integer >= 1", lambda n: n >= 1)]`.

    Args:
        allowed: which values are allowed, in words for a message.
        holds: whether a value is allowed.
    """

    allowed: str
    holds: Callable[[Any], object]


ModeName = Literal["store", "selective", "recompute", "invert"]  # of `runtime/mode.py`
Sign = Literal["fixed", "random"]  # of the momentum: `runtime/coupling.py`
Shard = Literal["none", "full", "hybrid"]  # how processes hold a network: `sharding/mesh.py`

MOST_KEPT_BITS = 15  # what `runtime/bits.py` packs

PositiveInt = Annotated[int, Bound("an integer >= 1", lambda n: n >= 1)]
NonNegativeInt = Annotated[int, Bound("an integer >= 0", lambda n: n >= 0)]
KeptBits = Annotated[int, Bound(f"an integer from 0 to {MOST_KEPT_BITS}", lambda n: 0 <= n <= MOST_KEPT_BITS)]
FractionBits = Annotated[int, Bound("an integer from 4 to 16", lambda n: 4 <= n <= 16)]
FiniteFloat = Annotated[float, Bound("a finite number", isfinite)]
NonZeroFloat = Annotated[float, Bound("a finite number other than 0", lambda x: isfinite(x) and x != 0)]
PositiveFloat = Annotated[float, Bound("a finite number > 0", lambda x: 0 < x < inf)]
NonNegativeFloat = Annotated[float, Bound("a finite number >= 0", lambda x: 0 <= x < inf)]
Probability = Annotated[float, Bound("a number in [0, 1]", lambda p: 0 <= p <= 1)]
Rate = Annotated[float, Bound("a number in [0, 1)", lambda p: 0 <= p < 1)]
UnitInterval = Annotated[float, Bound("a number in (0, 1]", lambda p: 0 < p <= 1)]
StepSize = Annotated[float, Bound("a number whose square is finite and not 0", lambda h: 0 < h * h < inf)]
