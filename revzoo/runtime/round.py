"""Rounds: the forwards whose second runs are compared with the first (`tripwire.py` says which, and what is compared)."""

from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from revzoo.errors import RecoveryError
from revzoo.runtime import seams
from revzoo.runtime.drift import Rounding
from revzoo.runtime.fingerprint import Fingerprint, take_fingerprint
from revzoo.runtime.forward import Forward
from revzoo.runtime.observation import CompareFunction, note_state, states
from revzoo.runtime.recorded_call import RecordedCall
from revzoo.runtime.segment import InvertedSegment
from revzoo.runtime.tripwire import Watch, get_setting, judge_deferred
from revzoo.runtime.update import Step, Update

_FULL_ROUNDS = 2
_PERIOD = 17  # after these, one round in this many; a prime, so that it is not always the same of several micro-batches
_MOST_KINDS = 256  # of forwards of one chain that are told apart


class _Counter:
    """How many backwards of one kind of forward have been compared, and how many forwards have passed since the last."""

    __slots__ = ("compared", "passed")

    def __init__(self) -> None:
        self.compared = self.passed = 0


_counters: WeakKeyDictionary[Any, dict[Any, _Counter]] = WeakKeyDictionary()


class Round:
    """A forward whose second runs are compared with the first.

    Args:
        counter: of forwards like this one.
        compares: whether they are compared; else its states are only shown to an observer.
    """

    __slots__ = ("_counter", "_is_noted", "compares")

    def __init__(self, counter: _Counter, compares: bool = True):
        self._counter = counter
        self._is_noted = False
        self.compares = compares

    def watch_segment(self, exact: bool) -> "SegmentWatch":
        """Return what compares the states of a segment."""
        return SegmentWatch(exact, self.compares)

    def compare_alone(self, call: RecordedCall, inputs: Sequence[Tensor]) -> None:
        """Compare a call that has been recovered from its own inputs."""
        if self.compares:
            try:
                call.compare_refilled(Watch())
            except RecoveryError:
                if not call.compute_all():
                    raise
                call.refill(*inputs)
                call.compare_refilled(Watch())
        self.note_compared()

    def note_compared(self) -> None:
        """Note that the backward of this forward has been compared."""
        if not self._is_noted:
            self._is_noted = True
            self._counter.compared += 1


def begin_round(first: Any, x: Tensor, kind: tuple[Any, ...] = ()) -> Round | None:
    """Return what looks at this forward's rebuilt states in backward: compares or shows them; None if nobody looks.

    Args:
        first: what the forward calls first; rounds are counted as long as it exists.
        x: its input.
        kind: what else distinguishes this forward from others, such as its schedule.
    """
    setting = get_setting()
    if not setting:
        return None if states.observer is None else Round(_Counter(), compares=False)
    judge_deferred()  # of a backward that autograd's engine has not ended: it was compiled, or has failed
    if torch._C._len_torch_dispatch_stack():  # bytes and FLOPs are counted in one, always those of a backward that is compared
        return Round(_Counter())
    shape = tuple([n if isinstance(n, int) else None for n in x.shape])
    counters = _counters.setdefault(first, {})
    if len(counters) > _MOST_KINDS:
        counters.clear()
    key = (shape, x.dtype, x.device, getattr(first, "training", None), *kind)
    counter = counters.get(key)
    if counter is None:
        counter = counters[key] = _Counter()
    counter.passed += 1
    is_due = counter.compared < _FULL_ROUNDS or counter.passed >= _PERIOD
    if not is_due and setting != "always" and states.observer is None:
        return None
    counter.passed = 0
    return Round(counter)


def _begin_chain(forward: Forward, x: Tensor, steps: Sequence[Step], segment: InvertedSegment | None) -> None:
    if segment is not None:
        forward.round = segment.round
    else:
        forward.round = begin_round(steps[0].f, x, tuple([(id(step.f), step.mode) for step in steps]))


seams.begin_forward.append(_begin_chain)


class Noted(NamedTuple):
    """What is remembered of a state that will be rebuilt.

    Args:
        fingerprint: of it; None if it is not compared.
        show: what to call with the rebuilt state.
    """

    fingerprint: Fingerprint | None
    show: CompareFunction | None


class SegmentWatch:
    """Compares the states that the recovery of one segment rebuilds, and predicts what rounding explains.

    Args:
        exact: whether inversion rebuilds every bit.
        compares: whether states are compared; else they are only shown.
    """

    def __init__(self, exact: bool, compares: bool):
        self._exact = exact
        self._compares = compares
        self.restart()

    def restart(self) -> None:
        """Begin again at the end of the segment."""
        self._watch = Watch()
        self._rounding: Rounding | None = None  # of the states rebuilt; none before the first
        self._growth: float | Tensor = 1.0  # of errors, from the last boundary to the present one

    def note(self, call: RecordedCall, state: Tensor, is_rebuilt: bool) -> Noted:
        """Return what to remember of the state before a call."""
        fingerprint = take_fingerprint(state, bits=self._exact) if is_rebuilt and self._compares else None
        return Noted(fingerprint, note_state(call.f, call.name, state))

    def begin(self, last: Sequence[Tensor]) -> None:
        """Note the states that recovery starts from: rounding errors are judged by their sizes."""
        if self._rounding is None and not self._exact:
            self._rounding = Rounding(last[0].dtype)
            for state in last if self._compares else ():
                self._watch.note_size(state)

    def compare(self, noted: Noted, call: RecordedCall, update: Update, rebuilt: Tensor, refilled: bool) -> None:
        """Compare a rebuilt state, and what autograd saves in the call if that has been refilled.

        Raises:
            RecoveryError: something differs by more than rounding explains.
        """
        tolerance = 0.0
        if self._rounding is not None:
            tolerance = self._rounding.step(call.conditions.spacing, update.b)
            self._growth = _multiply_growth(self._growth, update.growth)
        if noted.fingerprint is not None:
            of_layer = update.inverts_first
            self._watch.compare(call.name, noted.fingerprint, rebuilt, tolerance, self._explained, of_layer=of_layer)
        if refilled:
            call.compare_refilled(self._watch, self._explained, same_input=self._exact)
        if noted.show is not None:
            noted.show(rebuilt, 0.0 if self._rounding is None else self._growth * self._rounding.error)

    def compare_refilled(self, call: RecordedCall) -> None:
        """Compare what autograd saves in a call that has run on a state that was there."""
        call.compare_refilled(self._watch, self._explained, same_input=self._exact or self._rounding is None)

    def note_advance(self, update: Update) -> None:
        """Note that the states have moved towards the output by running forward."""
        self._growth = _multiply_growth(self._growth, 1 / update.growth)

    @property
    def _explained(self) -> float | Tensor:
        """The relative error that rounding explains in the present states because layers amplify it; 0 without layers."""
        if self._rounding is None or (not isinstance(self._growth, Tensor) and self._growth == 1):
            return 0.0
        return self._growth * self._rounding.explained


def _multiply_growth(growth: float | Tensor, by: float | Tensor) -> float | Tensor:
    """Return the product, at least 1: each state that is rebuilt is rounded again."""
    growth = growth * by
    return growth.clamp(min=1.0) if isinstance(growth, Tensor) else max(growth, 1.0)
