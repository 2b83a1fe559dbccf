"""Rounding errors of inversion in floating point, predicted from the couplings.

Each inverted step multiplies the error of the state it rebuilds by 1 / |b|, so the number of inverted steps in a row is
limited. Couplings with |b| = 1 and exact ones have no limit. Half-precision streams lose so much in every step that a warning
says so once.
"""

import math
import warnings
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor

from revzoo.dtype import HALF
from revzoo.errors import RecoveryError, join_names
from revzoo.host_copy import has_value, is_capturing
from revzoo.runtime import seams
from revzoo.runtime.coupling import Coupling
from revzoo.runtime.forward import Forward
from revzoo.runtime.segment import InvertedSegment
from revzoo.runtime.update import Step

_LARGEST_ERROR = 0.1  # largest relative error of a rebuilt state, in the worst case; usually it is a tenth of that
_checks_growth = ContextVar("checks_growth", default=True)


class Seen:
    """Networks for which something has been done, as `warnings` remembers source lines; for as long as they exist."""

    def __init__(self) -> None:
        self._keys: MutableMapping[Any, set[tuple[Any, ...]]] = WeakKeyDictionary()

    def __len__(self) -> int:
        return sum(map(len, self._keys.values()))

    def add(self, dtype: torch.dtype, modules: Sequence[Any]) -> None:
        """Remember the modules of a chain or of a part of it, with the dtype of the states."""
        self._keys.setdefault(modules[0], set()).add((dtype, *map(ref, modules)))

    def has(self, dtype: torch.dtype, modules: Sequence[Any]) -> bool:
        return (dtype, *map(ref, modules)) in self._keys.get(modules[0], ())


_checked = Seen()  # layers whose noise has been looked at
_reported = Seen()  # chains already warned about


@contextmanager
def ignore_error_growth() -> Iterator[None]:
    """Allow runs of inverted steps of any length without a word, for counting bytes, and for measuring what rounding does."""
    token = _checks_growth.set(False)
    try:
        yield
    finally:
        _checks_growth.reset(token)


def count_invertible_steps(couplings: Sequence[Coupling], dtype: torch.dtype, error: float = _LARGEST_ERROR) -> int | None:
    """Return how many steps in a row may be inverted; None is any number.

    Args:
        couplings: the couplings of all steps.
        dtype: dtype of the streams.
        error: largest relative error of a rebuilt state that rounding alone may cause. The default is that of the chain, which
            refuses longer runs.
    """
    if not couplings or any(coupling.is_exact for coupling in couplings):
        return None
    if any(coupling.b == 0 for coupling in couplings):
        return 0
    largest = max(1 / abs(coupling.b) for coupling in couplings)
    if largest <= 1 or largest ** len(couplings) * torch.finfo(dtype).eps <= error:
        return None
    return int(math.log(error / torch.finfo(dtype).eps, largest))


class ChainGrowth:
    """The factor by which a run of inverted steps multiplies rounding errors, step by step."""

    def __init__(self) -> None:
        self._factor = 1.0

    def add(self, coupling: Coupling, name: str, dtype: torch.dtype) -> None:
        """Count one more step.

        Raises:
            RecoveryError: this many steps in a row would leave only rounding errors of the first state.
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


class Rounding:
    """The relative error that rounding explains in the states that a backward rebuilds one after the other.

    The first one differs by the spacing e of the streams' numbers. If f computes with a coarser spacing h, a share e / h of its
    numbers is rounded to the neighbour, so its output differs by sqrt(e h). Each step multiplies the error by 1 / |b|. What f
    itself amplifies is not known; the margins are for that.

    Args:
        dtype: dtype of the streams.
    Attributes:
        error: of the states rebuilt so far, without the margins.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.error = 0.0
        self._finest = torch.finfo(dtype).eps
        self._least_tolerance = 3 * math.sqrt(self._finest)

    def step(self, spacing: float, b: float) -> float:
        """Return the largest relative error that rounding explains in the state that one more step rebuilds.

        Args:
            spacing: relative spacing of the coarsest numbers that f computes with.
            b: the coupling's coefficient.
        """
        self.error = max(self._finest, self.error, math.sqrt(self.error * spacing)) / min(1.0, abs(b))
        return max(self._least_tolerance, self.explained)

    @property
    def explained(self) -> float:
        """The relative error that rounding explains, without the least tolerance."""
        return 32 * self.error


class Noise:
    """The rounding errors that the inverses of layers amplify, predicted from their `alpha`.

    A warning says once where they become too large. On a CPU every forward looks; elsewhere only the first, as reading what
    norms amplify waits for the device.

    Args:
        dtype: dtype of the state.
        layers: the layers of one run, in the order of forward.
    """

    def __init__(self, dtype: torch.dtype, layers: Sequence[Any]):
        self._dtype, self._layers = dtype, layers
        self.is_new = not _checked.has(dtype, layers)
        _checked.add(dtype, layers)

    def check(self, growths: Sequence[tuple[str, float]], step: str | None) -> None:
        """Warn if what is rebuilt is predicted to differ by more than 10 % of its size.

        Args:
            growths: names of the layers, and the factors by which their inverses multiply relative errors.
            step: name of the step that the layers are f of, if they are.
        """
        if _reported.has(self._dtype, self._layers) or not _checks_growth.get():
            return
        error = least = torch.finfo(self._dtype).eps
        worst = (error, "")
        for name, growth in reversed(growths):
            error = max(least, error * growth)
            worst = max(worst, (error, name))
        if not worst[0] > _LARGEST_ERROR:
            return
        _reported.add(self._dtype, self._layers)
        if step is None:
            anchors = join_names(_place_anchors(growths, least))
            remedy = f"Set the mode of {anchors} to 'recompute': it keeps its input, where noise starts again"
        else:
            remedy = f"Set the schedule of {step} to 'recompute', or make several steps of its layers"
        warnings.warn(
            f"Rebuilding {len(growths)} layers in {self._dtype}, one by one from the output of {growths[-1][0]}, is predicted "
            f"to amplify rounding until the input of {worst[1]} has a signal-to-noise ratio of {worst[0] ** -2:.0e} (the "
            f"product of the alphas). {remedy}. Larger slopes and norms with a larger eps_i amplify less.",
            stacklevel=2,
        )


def _place_anchors(growths: Sequence[tuple[str, float]], least: float) -> list[str]:
    """Return the fewest layers that have to keep their input so that no error is too large."""
    anchors, error = list[str](), least
    for name, growth in reversed(growths):
        error = max(least, error * growth)
        if error > _LARGEST_ERROR:
            anchors.append(name)
            error = least
    return anchors[::-1]


def _warn_of_half_precision(dtype: torch.dtype, inverted: Sequence[Any]) -> None:
    """Say once for a chain what its inverted steps lose."""
    if not inverted or _reported.has(dtype, inverted) or not _checks_growth.get():
        return
    _reported.add(dtype, inverted)
    loss = len(inverted) * torch.finfo(dtype).eps
    warnings.warn(
        f"The streams are {dtype}: inverting these {len(inverted)} steps loses about {loss:.1e} of the state to rounding "
        "before f amplifies it. Keep the streams in float32, with autocast for what happens inside the steps, or set the "
        "schedule to 'recompute' or 'store'.",
        stacklevel=2,
    )


def _begin_chain(forward: Forward, x: Tensor, steps: Sequence[Step], segment: InvertedSegment | None) -> None:
    """Refuse a chain whose inversion would leave rounding errors alone, and warn of half precision."""
    if forward.grid is not None:
        return
    growth = ChainGrowth()
    for step in steps:
        if not step.mode.inverts:
            growth = ChainGrowth()
        elif abs(step.coupling.b) != 1:
            growth.add(step.coupling, step.name, x.dtype)
    if x.dtype in HALF and has_value(x) and not is_capturing():
        _warn_of_half_precision(x.dtype, [step.f for step in steps if step.mode.inverts])


seams.begin_forward.append(_begin_chain)
