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

from revzoo.device import has_value, is_capturing
from revzoo.dtype import HALF
from revzoo.errors import RecoveryError, join_names
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


def warn_of_noise(
    dtype: torch.dtype, growths: Sequence[tuple[Any, str, float | Tensor]], step: str | None, *, reads_always: bool
) -> None:
    """Warn once if the inverses of layers are predicted to rebuild something that differs by more than 10 % of its size.

    Args:
        dtype: dtype of the state.
        growths: the layers of one run in the order of forward, each with its name and the factor by which its inverse is
            predicted to multiply relative errors.
        step: name of the step that the layers are f of, if they are.
        reads_always: whether to look in every forward. On an accelerator reading the factors waits for it.
    """
    layers = [layer for layer, *_ in growths]
    is_new = not _checked.has(dtype, layers)
    _checked.add(dtype, layers)
    if not (reads_always or is_new) or _reported.has(dtype, layers) or not _checks_growth.get():
        return
    factors = [(name, float(growth)) for _, name, growth in growths]
    error = least = torch.finfo(dtype).eps
    worst = (error, "")
    for name, growth in reversed(factors):
        error = max(least, error * growth)
        worst = max(worst, (error, name))
    if not worst[0] > _LARGEST_ERROR:
        return
    _reported.add(dtype, layers)
    if step is None:
        anchors = join_names(_place_anchors(factors, least))
        remedy = f"Set the mode of {anchors} to 'recompute': it keeps its input, where noise starts again"
    else:
        remedy = f"Set the schedule of {step} to 'recompute', or make several steps of its layers"
    warnings.warn(
        f"Rebuilding {len(factors)} layers in {dtype}, one by one from the output of {factors[-1][0]}, is predicted to amplify "
        f"rounding until the input of {worst[1]} has a signal-to-noise ratio of {worst[0] ** -2:.0e} (the product of the "
        f"alphas). {remedy}. Larger slopes and norms with a larger eps_i amplify less.",
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
    factor = 1.0
    for step in steps:
        factor = _grow_errors(factor, step, x.dtype) if step.mode.inverts else 1.0
    if x.dtype in HALF and has_value(x) and not is_capturing():
        _warn_of_half_precision(x.dtype, [step.f for step in steps if step.mode.inverts])


def _grow_errors(factor: float, step: Step, dtype: torch.dtype) -> float:
    """Return by how much rounding errors are multiplied up to this inverted step; complain if that is too much."""
    b = step.coupling.b
    if abs(b) == 1 or not _checks_growth.get():
        return factor
    if b == 0:
        raise RecoveryError(
            f"{step.name} cannot be inverted: with b = 0 it forgets the older stream. Set the schedule to 'recompute', "
            "'selective' or 'store', or choose a coupling with b != 0."
        )
    factor /= abs(b)
    if factor * torch.finfo(dtype).eps > _LARGEST_ERROR:
        raise RecoveryError(
            f"Inverting {step.name} and the steps before it multiplies rounding errors by {factor:.0e} (1 / |b| each; b = "
            f"{b:g}), too much for {dtype}. Set the schedule of every few steps to 'recompute' or 'store', use 'recompute' for "
            "all, or a coupling with |b| nearer to 1."
        )
    return factor


seams.begin_forward.append(_begin_chain)
