"""What a forward call records so that backward can rebuild the tensors that were dropped.

The forward of a step runs as ordinary autograd code under `saved_tensors_hooks`: the pack hook drops each tensor that autograd
wants to save and leaves the number of its slot in the call. When backward unpacks the first slot of a call, the call is run
again. That second run refills all slots of the call and, for an inverted step, also gives the state before it. The graph stays
PyTorch's own, so gradients go where they always go: `torch.autograd.grad`, `retain_graph`, hooks, DDP and FSDP see nothing
unusual.

    RecordedCall     one call of one function, the tensors it dropped, and how to run it again (`recorded_call.py`)
    SavedInputs      recovers one call from its own inputs, which it keeps        (modes `recompute` and `selective`)
    InvertedSegment  recovers the calls of consecutive inverted steps from one pair of states         (mode `invert`)

References point one way: the graph holds the hooks of its calls, a hook its RecordedCall and what recovers that (SavedInputs or
InvertedSegment), and a segment all its calls. So everything is freed with the graph, without the garbage collector. A segment
holds exactly one pair of states at any time: after forward the last pair, which is the chain's own output if the segment ends
the chain; in backward the pair recovered last.

Known inefficiency: a second backward through a retained graph runs the chain forward again to get back to its end.

Source: the reconstruction is Gomez et al. 2017, Algorithm 1.
"""

from collections.abc import Iterable, Sequence
from threading import RLock
from typing import NamedTuple, Protocol

from torch import Tensor

from revzoo.errors import RecoveryError
from revzoo.runtime.coupling import Pair
from revzoo.runtime.drift import Rounding
from revzoo.runtime.recorded_call import RecordedCall, make_inner_derivative_error
from revzoo.runtime.tripwire import Fingerprint, Watch, is_watching, judge_arrived, send_comparisons, take_fingerprint


class State:
    """A tensor kept for recovery, with a check that it was not modified in place.

    It is detached, so that it holds no graph (a chain's output would otherwise keep itself alive), and shares storage
    and version counter with the original.
    """

    def __init__(self, tensor: Tensor):
        self._tensor = tensor.detach()
        self._version = self._tensor._version

    def get(self) -> Tensor:
        """Return the tensor.

        Raises:
            RecoveryError: it was modified in place since it was kept.
        """
        if self._tensor._version != self._version:
            raise RecoveryError(
                f"A tensor {tuple(self._tensor.shape)} that backward needs (an output of the chain, or the input of a "
                "recomputed step) was modified in place after forward. Replace the in-place operation (x += y, relu_) by "
                "x = x + y, or set the schedule to 'store'."
            )
        return self._tensor


class SavedInputs:
    """Recovers one call from its inputs, which it keeps.

    Cost: the inputs, and one more forward of the call up to the last tensor that autograd saves in it (for a linear layer,
    which saves only its input, nothing is computed).
    """

    def __init__(self, inputs: Sequence[Tensor]):
        self.lock = RLock()
        self._inputs = [State(x) for x in inputs]

    def recover(self, call: RecordedCall, *, ahead: bool = False) -> None:
        judge_arrived()
        call.run_again(*(x.get() for x in self._inputs), stop_early=True)
        call.compare_refilled(Watch())

    def get_sources(self, call: RecordedCall) -> Iterable[Tensor]:
        return ()  # the graph holds them until the gradient has been queued


class PairUpdate(Protocol):
    """One step or bijection as an `InvertedSegment` sees it: how it changes the pair of states, and how to undo that."""

    b: float

    @property
    def kept_bits(self) -> Sequence[Tensor]:
        """What `invert` uses up besides the states."""

    def advance(self, pair: Pair, out: Tensor | None) -> Pair: ...

    def invert(self, pair: Pair, out: Tensor | None) -> Pair: ...


class _Item(NamedTuple):
    """A step or bijection of a segment.

    Args:
        update: how it changes the pair of states.
        call: the call of the step's f; a bijection has none.
        fingerprint: of the state that its inversion rebuilds.
    """

    update: PairUpdate
    call: RecordedCall | None
    fingerprint: Fingerprint | None


class InvertedSegment:
    """Recovers the calls of consecutive inverted steps from one pair of states, which moves along the chain.

    Boundary i is in front of item i of the segment, so `_pair` is (w[i-1], w[i]) there. To recover the call of item i, the pair
    moves from boundary i + 1 to i. If backward asks for a call elsewhere, the pair first moves to it: towards the input by
    inverting, towards the output by running forward.

    Args:
        exact: whether inversion rebuilds every bit.

    Cost: one pair of states, one extra forward of each step.
    """

    def __init__(self, exact: bool) -> None:
        self.lock = RLock()
        self._exact = exact
        self._items: list[_Item] = []
        self._pair: tuple[State, State] | None = None
        self._at = 0  # the boundary that the pair belongs to
        self._in_use: list[RecordedCall] = []  # the calls recovered last
        self._watch = Watch()
        self._rounding: Rounding | None = None  # of the states rebuilt; none before the first

    def append(self, update: PairUpdate, call: RecordedCall | None, before: Pair) -> None:
        """Add the next step or bijection, in the order of forward.

        Args:
            update: how it changes the pair of states.
            call: the call of the step's f.
            before: the states in front of it.
        """
        fingerprint = None
        if call is not None:
            call.place = len(self._items)
            if self._items and is_watching():  # the state before the first step is not rebuilt
                fingerprint = take_fingerprint(before[0], bits=self._exact)
        self._items.append(_Item(update, call, fingerprint))

    def end(self, pair: Pair) -> None:
        """Keep the states after the last step, from which recovery will start."""
        self._pair, self._at = (State(pair[0]), State(pair[1])), len(self._items)

    def recover(self, call: RecordedCall, *, ahead: bool = False) -> None:
        """Refill `call`, and move the pair to the boundary before it, unless it is the first of the segment."""
        judge_arrived()
        goal = call.place
        if goal is None or self._pair is None:
            raise make_inner_derivative_error(call.name)
        self._free_unused(call, ahead)
        while self._at > goal + 1:
            self._invert(refill=False)
        while self._at < goal:
            self._advance()
        if self._at != goal and goal > 0:
            self._invert(refill=True)
            return
        # The state before the first step is not needed.
        call.run_again(self._states()[self._at == goal], stop_early=True)
        call.compare_refilled(self._watch)
        if goal == 0 and not ahead:
            send_comparisons()

    def get_sources(self, call: RecordedCall) -> Iterable[Tensor]:
        bits = self._items[self._at - 1].update.kept_bits if self._at else ()
        return *(self._states() if self._pair else ()), *bits

    def _free_unused(self, call: RecordedCall, ahead: bool) -> None:
        """Free what backward has not taken of other calls; where `call` is recovered ahead, not of the one before it."""
        others = [other for other in self._in_use if other is not call]
        still_in_use = others[-1:] if ahead else []
        for other in others[: len(others) - len(still_in_use)]:
            other.free_refilled()
        self._in_use = [*still_in_use, call]

    def _invert(self, refill: bool) -> None:
        update, call, fingerprint = self._items[self._at - 1]
        pair = self._states()
        if call is None:
            self._move(update.invert(pair, None), -1)
            return
        if self._rounding is None and not self._exact:
            self._rounding = Rounding(pair[0].dtype)
            for state in pair:  # by their sizes rounding errors are judged
                self._watch.note_size(state)
        out = call.run_again(pair[0], refill=refill, check_draws=fingerprint is None)
        rebuilt = update.invert(pair, out)
        del out
        tolerance = 0.0 if self._rounding is None else self._rounding.step(call.spacing, update.b)
        if fingerprint is None:
            call.require_same_draws()
        else:
            self._watch.compare(call.name, fingerprint, rebuilt[0], tolerance)
        self._move(rebuilt, -1)

    def _advance(self) -> None:
        update, call, _ = self._items[self._at]
        pair = self._states()
        out = None if call is None else call.run_again(pair[1], refill=False)
        self._move(update.advance(pair, out), +1)

    def _move(self, pair: Pair, by: int) -> None:
        self._pair, self._at = (State(pair[0]), State(pair[1])), self._at + by

    def _states(self) -> Pair:
        assert self._pair is not None, "recovery before the end of forward"
        return self._pair[0].get(), self._pair[1].get()
