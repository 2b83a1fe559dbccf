"""The tripwire: small fingerprints that show when a rebuilt tensor is not the one of the first run.

A second run repeats the first only if f depends on nothing but its input, its parameters and torch's random streams. Python's
`random`, a generator of f's own, a global counter, an attribute set between two calls: none of these can be seen from outside.
Their effect can. In forward, each state that will be rebuilt leaves a fingerprint; in backward, the rebuilt state is compared.

    exact arithmetic    sums of bits (`fingerprint.py`); they must be equal
    floating point      projections; they may differ by what rounding explains

What autograd saves in a call is compared, too (`call_watch.py`).

On a CPU, a difference is raised as the state is rebuilt. Other devices send what they have found to the host at the end of a
backward that is compared: only then the host waits for the device. While a CUDA graph is captured, no fingerprints are taken:
what the warm-up steps have shown holds for the graph, which repeats its kernels.

Compared in full are the first two backwards of a chain, and of each new shape, dtype and schedule of it; after them one in 17.
So a difference that is there every time is found at once, one that comes now and then within some steps.
`set_tripwire("always")` compares every backward.

Cost: in a backward that is compared, each state is read once more in forward and once more in backward, by one kernel on an
accelerator. A fingerprint is a few Python numbers on a CPU, at most 1/128 of the state on other devices.
"""

import math
import warnings
from collections.abc import Sequence
from itertools import islice
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from revzoo.device import HostCopy, call_after_backward, is_capturing
from revzoo.errors import InputError, RecoveryError
from revzoo.runtime.fingerprint import Fingerprint, take_fingerprint
from revzoo.runtime.forward import second_run

# The tolerance for a saved tensor is relative to its own size, or to this share of the largest state if that is larger: a norm
# turns a state that is constant or zero into nothing but rounding.
_LEAST_SHARE = 0.05
# A state may differ by this many times the largest error of the states rebuilt before it, up to this relative error.
_GROWTH_OF_STATE, _LARGEST_TOLERANCE = 30.0, 0.25
# What a step computes from a state may differ by more, where it normalises what nearly cancels.
_GROWTH_IN_STEP = 1000.0
_SMALL = 0.1  # of the largest state so far: a state that much smaller is judged by its own size as well
_COARSE = 0.05  # a tolerance of half precision, which is warned of in forward
_NOTEWORTHY = 0.01  # if rounding takes more than this share of a state, a warning says so

_setting: bool | Literal["always"] = True


class set_tripwire:
    """Switch the tripwire on or off, as a function, or as a context manager that restores the previous state.

    It is on by default. Without it, only what changes the shapes of saved tensors, or how many random numbers a call draws, is
    noticed.

    Args:
        enabled: True compares the first two backwards of a chain and later one in 17, "always" all, False none.
    """

    def __init__(self, enabled: bool | Literal["always"]):
        global _setting
        if enabled not in (True, False, "always"):
            raise InputError(f'The tripwire is True, False or "always". Received: {enabled!r}.')
        self._previous, _setting = _setting, enabled

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        global _setting
        _setting = self._previous


def get_setting() -> bool | Literal["always"]:
    """Return how the tripwire is set, False within a second run: what is recorded then is thrown away."""
    return False if second_run.get() else _setting


class Watch:
    """Compares what the recovery of one segment or call rebuilds.

    Rounding errors are relative to the largest state that they come from, so a state is judged by the largest so far. They grow
    by degrees from one state to the next; a step that runs differently makes a jump.

    Args:
        message: of errors; None where what is compared belongs to a chain.
    """

    def __init__(self, message: str | None = None) -> None:
        self._message = message
        self._largest = 0.0
        self._largest_error = 0.0
        self._has_warned = False
        self._has_overflowed = False  # whether forward ended with NaN or infinite numbers, which inversion spreads

    def note_size(self, state: Tensor) -> None:
        """Consider the size of a state that was not rebuilt."""
        if (taken := take_fingerprint(state)) is not None:
            # It is compared with itself, so that its size arrives from a device in its turn.
            self._judge_or_defer(_Comparison(self, "", taken, taken, math.inf, of_state=True))

    def compare(
        self,
        name: str,
        expected: Fingerprint,
        rebuilt: Tensor,
        tolerance: float,
        explained: float | Tensor = 0.0,
        *,
        of_state: bool = True,
        of_layer: bool = False,
    ) -> bool:
        """Compare a rebuilt tensor with its fingerprint, now or on the device; return whether they can be compared.

        Args:
            name: name of the step that was run again, for messages.
            expected: the fingerprint of the original.
            rebuilt: the rebuilt tensor.
            tolerance: largest difference, relative to the largest state so far; 0 where bits are compared.
            explained: relative error that is predicted, which counts where it exceeds the tolerance. Of a device it may be a
                tensor, which is not read: the difference is scaled instead.
            of_state: whether this is a state. Other tensors are judged by their own size.
            of_layer: whether this state is the input of a layer, which may have scaled it: the sizes before it do not count.

        Raises:
            RecoveryError: it differs by more, on a CPU.
        """
        actual = take_fingerprint(rebuilt, bits=tolerance == 0)
        if actual is None or actual.kind != expected.kind:
            return False
        scale = None
        if not isinstance(expected.values, Tensor):
            tolerance = max(tolerance, float(explained))
        elif isinstance(explained, Tensor):
            scale = (explained / tolerance).clamp_min(1.0)
        else:
            tolerance = max(tolerance, explained)
        self._judge_or_defer(_Comparison(self, name, expected, actual, tolerance, of_state, of_layer, scale))
        return True

    def judge(self, comparison: "_Comparison", error: float, size: float) -> None:
        """Raise RecoveryError if two fingerprints differ too much.

        Args:
            comparison: what is compared.
            error: norm of the difference; where bits are compared, 1 if they differ and 0 if not.
            size: norm of the original's fingerprint.
        """
        tolerance = comparison.tolerance
        was_finite = comparison.expected.is_finite and math.isfinite(size)
        is_finite = comparison.actual.is_finite and not math.isnan(error)
        if comparison.of_state and not was_finite:
            self._has_overflowed = True
        if not is_finite and self._has_overflowed:
            return  # so will the gradients be
        if was_finite and not is_finite:
            error = math.nan
        elif not math.isfinite(error):
            return
        is_small = comparison.of_state and not comparison.of_layer and 0 < size < _SMALL * self._largest
        own_error = error / size if is_small and 0 < tolerance < _COARSE else 0.0
        if comparison.of_layer:
            self._largest = size
        elif comparison.of_state:
            self._largest = size = max(size, self._largest)
        size = max(size, self._largest * _LEAST_SHARE)
        if error:
            error = error / size if size else math.inf
        has_grown = False
        if comparison.of_state and tolerance:
            has_overflowed = math.isnan(error) and self._largest_error > _LARGEST_TOLERANCE
            has_grown = has_overflowed or error <= _GROWTH_OF_STATE * self._largest_error
            tolerance = max(tolerance, min(_GROWTH_OF_STATE * self._largest_error, _LARGEST_TOLERANCE))
            self._largest_error = max(self._largest_error, error)
        elif not comparison.of_state:
            tolerance = max(tolerance, _GROWTH_IN_STEP * self._largest_error)
        if not error <= tolerance:
            raise RecoveryError(self._message or _describe(comparison, error, tolerance, has_grown))
        if own_error > _NOTEWORTHY and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"Rounding takes {own_error:.0%} of the state before {comparison.name}, which is far smaller than later "
                "states of the chain, and as much of the gradients there. Scale the chain's input up, use exact=True, or set "
                f"the schedule of {comparison.name} to 'recompute'.",
                stacklevel=2,
            )

    def _judge_or_defer(self, comparison: "_Comparison") -> None:
        global _deferred_in
        expected, actual, task = comparison.expected.values, comparison.actual.values, torch._C._current_graph_task_id()
        if not isinstance(expected, Tensor):
            if comparison.tolerance == 0:
                self.judge(comparison, float(expected != actual), 1.0)
            else:
                self.judge(comparison, math.dist(expected, actual), math.hypot(*expected))
            return
        _deferred.append(comparison)
        if task not in (-1, _deferred_in):
            _deferred_in = task
            call_after_backward(judge_deferred)


class _Comparison(NamedTuple):
    watch: Watch
    name: str
    expected: Fingerprint
    actual: Fingerprint
    tolerance: float
    of_state: bool
    of_layer: bool = False
    scale: Tensor | None = None  # a factor on the tolerance


_deferred: list[_Comparison] = []  # whose fingerprints a device has still to compute
_deferred_in = -1  # the backward at whose end they are judged


def judge_deferred() -> None:
    """Raise RecoveryError for the first of the deferred comparisons that does not fit. Waits for the devices."""
    if not _deferred or is_capturing():  # those of earlier steps do not belong into a graph
        return
    deferred, _deferred[:] = list(_deferred), []
    with _disable_current_modes():  # which may run this step without values
        for device in {c.actual.values.device for c in deferred}:
            _judge_together([c for c in deferred if c.actual.values.device == device])


def _judge_together(comparisons: list[_Comparison]) -> None:
    """Judge comparisons on one device, which sends what it finds in all of them together."""
    bits, norms = ([c for c in comparisons if (c.tolerance == 0) == of_bits] for of_bits in (True, False))
    numbers = list[Tensor]()
    if bits:
        numbers.append(torch.cat([c.expected.values != c.actual.values for c in bits]))
    if norms:
        expected, actual = ([getattr(c, which).values for c in norms] for which in ("expected", "actual"))
        errors = _take_norms(torch._foreach_sub(actual, expected))
        errors = [e if c.scale is None else e / c.scale for c, e in zip(norms, errors, strict=True)]
        numbers.append(torch.stack([*errors, *_take_norms(expected)]).double())
    found = iter(HostCopy(*numbers).read())
    if bits:
        differs = iter(next(found))
        for c in bits:
            c.watch.judge(c, float(any(list(islice(differs, len(c.expected.values))))), 1.0)
    if norms:
        sizes = next(found)
        for c, error, size in zip(norms, sizes, sizes[len(norms) :], strict=False):
            c.watch.judge(c, error, size)


def _take_norms(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the norms of flat tensors, of all of one length together: `_foreach_norm` of PyTorch 2.15 copies from the host."""
    alike: dict[Any, list[int]] = {}
    for place, x in enumerate(tensors):
        alike.setdefault((len(x), x.dtype), []).append(place)
    norms = list(tensors)
    for places in alike.values():
        together = torch.linalg.vector_norm(torch.stack([tensors[place] for place in places]), dim=1)
        for place, norm in zip(places, together.unbind(), strict=True):
            norms[place] = norm
    return norms


def _describe(comparison: _Comparison, error: float, tolerance: float, has_grown: bool) -> str:
    """Return what is wrong with a tensor that differs by more than the tolerance.

    Args:
        has_grown: whether the states rebuilt before differed nearly as much, as they do where rounding errors grow.
    """
    what = "the state rebuilt from its output" if comparison.of_state else "what autograd saves in it"
    if tolerance == 0:
        by = "in some bits"
    elif math.isnan(error):
        by = "and is not finite any more"
    else:
        by = f"by {error:.6g} of its size, of which rounding explains {tolerance:.6g}"
    if has_grown:
        return (
            f"Errors have grown from state to state until {comparison.name}: {what} differs from forward {by}. Most likely "
            "its function and those after it amplify rounding. Set the schedule of some of them to 'recompute', where errors "
            "start again, or use 'store'; in a chain of steps, exact=True avoids such errors."
        )
    return (
        f"{comparison.name} ran differently the second time: {what} differs from forward {by}. Its function must depend on its "
        "input, parameters and torch's random stream alone. Usual causes: Python's or NumPy's random, a torch.Generator of its "
        "own, a counter or an attribute that changed in between, a kernel that does not repeat, memory that is read before it "
        "is written (new_empty; use new_zeros), or rounding that it amplifies (exact=True avoids that). Pass what changes as "
        "the side input, or set its schedule to 'store'."
    )
