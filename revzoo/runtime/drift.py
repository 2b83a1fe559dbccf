"""What inversion in floating point rounds away: foreseen from the couplings, and measured in half precision.

Each inverted step multiplies the error of the state before it by 1 / |b|, so a run of them is limited; couplings with |b| = 1,
and those that are exact, have no limit. Half-precision streams lose so much in every step that it is measured and said once.
"""

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from revzoo.errors import RecoveryError
from revzoo.runtime.coupling import Coupling

HALF = (torch.float16, torch.bfloat16)
_LARGEST_ERROR = 0.1  # of a rebuilt state, relative, at worst: a tenth of it is usual, and more is no gradient
_checks_growth = ContextVar("checks_growth", default=True)
_reported: set[tuple[Any, ...]] = set()  # chains already warned about, as `warnings` keeps for its own locations


@contextmanager
def growth_unchecked() -> Iterator[None]:
    """Let runs of inverted steps be counted, whatever they would lose."""
    token = _checks_growth.set(False)
    try:
        yield
    finally:
        _checks_growth.reset(token)


def count_invertible_steps(couplings: Sequence[Coupling], dtype: torch.dtype, error: float = _LARGEST_ERROR) -> int | None:
    """Return how many steps in a row may be inverted in this dtype; None is any number.

    Args:
        couplings: of all steps.
        error: of a rebuilt state, relative, from rounding alone: more than the default is refused by the chain itself.
    """
    if any(coupling.is_exact for coupling in couplings):
        return None
    if any(coupling.b == 0 for coupling in couplings):
        return 0
    largest = max(1 / abs(coupling.b) for coupling in couplings)
    if largest <= 1 or largest ** len(couplings) * torch.finfo(dtype).eps <= error:
        return None
    return int(math.log(error / torch.finfo(dtype).eps, largest))


class Growth:
    """How much a run of inverted steps multiplies rounding errors, as it grows."""

    def __init__(self) -> None:
        self._factor = 1.0

    def add(self, coupling: Coupling, name: str, dtype: torch.dtype) -> None:
        """Note one more step.

        Raises:
            RecoveryError: the run would rebuild its first state from rounding errors alone.
        """
        self._factor = math.inf if coupling.b == 0 else self._factor / abs(coupling.b)
        if not _checks_growth.get():
            return
        if coupling.b == 0:
            raise RecoveryError(
                f"{name} cannot be inverted: with b = 0 it forgets the older stream. Set the schedule to 'recompute', "
                "'selective' or 'store', or choose a coupling with b != 0."
            )
        if self._factor * torch.finfo(dtype).eps > _LARGEST_ERROR:
            raise RecoveryError(
                f"Inverting {name} and the steps before it multiplies rounding errors by {self._factor:.0e} (1 / |b| each; b = "
                f"{coupling.b:g}), too much for {dtype}. Set the schedule of every few steps to 'recompute' or 'store', use "
                "'recompute' for all, or a coupling with |b| nearer to 1."
            )


class Drift:
    """Measures, in the first forward of a chain with half-precision streams, what inverting its steps would lose.

    Args:
        dtype: of the streams.
        steps: that are inverted.
    """

    def __init__(self, dtype: torch.dtype, steps: Sequence[Any]):
        self._key, self._steps = (dtype, *map(id, steps)), len(steps)
        self._error: Tensor | float = 0.0

    @property
    def is_due(self) -> bool:
        """Whether there is something to say that has not been said."""
        return self._steps > 0 and self._key not in _reported

    @torch.no_grad()
    def add(self, previous: Tensor, rebuilt: Tensor) -> None:
        """Note a state before a step, and the same inverted."""
        scale = torch.linalg.vector_norm(previous).clamp_min(torch.finfo(previous.dtype).tiny)
        self._error = self._error + torch.linalg.vector_norm(rebuilt - previous) / scale

    def warn(self) -> None:
        """Say how much is lost."""
        _reported.add(self._key)
        warnings.warn(
            f"The streams are {self._key[0]}: inverting these {self._steps} steps loses {float(self._error):.1e} of the "
            "state to rounding before f amplifies it (measured in this forward). Keep the streams in float32, with autocast "
            "for what happens inside the steps, or set the schedule to 'recompute' or 'store'.",
            stacklevel=2,
        )
