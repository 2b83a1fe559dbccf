"""What a forward call records so that backward can rebuild the tensors that were dropped.

The forward of a step runs as ordinary autograd code under `saved_tensors_hooks`: the pack hook drops each tensor that autograd
wants to save and leaves the number of its slot in the call. When backward unpacks the first slot of a call, the call is run
again. That second run refills all slots of the call and, for an inverted step, also gives the state before it. The graph stays
PyTorch's own, so gradients go where they always go: `torch.autograd.grad`, `retain_graph`, hooks, DDP and FSDP see nothing
unusual.

    RecordedCall     one call of one function, the tensors it dropped, and how to run it again (`recorded_call.py`)
    SavedInputs      recovers one call from its own inputs, which it keeps        (modes `recompute` and `selective`)
    InvertedSegment  recovers the calls of consecutive inverted steps or layers from the states       (mode `invert`)
                     after the last of them

References point one way: the graph holds the hooks of its calls, a hook its RecordedCall and what recovers that (SavedInputs or
InvertedSegment), and a segment all its calls. So everything is freed with the graph, without the garbage collector. A segment
holds the states of exactly one place at any time: after forward the last ones, which are the chain's own output if the segment
ends the chain; in backward those recovered last. Between steps the states are a pair, between layers they are one tensor.

Known inefficiency: a second backward through a retained graph runs the chain forward again to get back to its end.

Source: the reconstruction is Gomez et al. 2017, Algorithm 1.
"""

from collections.abc import Callable, Iterable
from operator import attrgetter
from threading import RLock
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from revzoo.errors import RecoveryError
from revzoo.runtime.observation import note_inversion
from revzoo.runtime.recorded_call import RecordedCall
from revzoo.runtime.refill_hooks import Recoverer, make_inner_derivative_error
from revzoo.runtime.update import States, Update

_get_version: Callable[[Tensor], int] = attrgetter("_version")
_detach: Callable[[Tensor], Tensor] = Tensor.detach


class KeptStates:
    """Tensors kept for recovery, with a check that they were not modified in place.

    They are detached, so that they hold no graph (a chain's output would otherwise keep itself alive), and share storage and
    version counter with the originals.
    """

    __slots__ = ("_tensors", "_versions")

    def __init__(self, tensors: Iterable[Tensor]):
        self._tensors = tuple(map(_detach, tensors))
        self._versions = list(map(_get_version, self._tensors))

    def get(self, find_place: Callable[[], str]) -> States:
        """Return the tensors.

        Args:
            find_place: returns words for the message that say which states they are.
        Raises:
            RecoveryError: one was modified in place since it was kept.
        """
        now = list(map(_get_version, self._tensors))
        if now != self._versions:
            shape = next(tuple(t.shape) for t, a, b in zip(self._tensors, now, self._versions, strict=True) if a != b)
            raise RecoveryError(
                f"A tensor {shape} that backward needs, the state {find_place()}, was modified in place after forward. Replace "
                "the in-place operation (x += y, relu_) by x = x + y, or set the schedule to 'store'."
            )
        return self._tensors


class KeptInputs(Protocol):
    """Has the inputs of a call."""

    def get(self, find_place: Callable[[], str]) -> States:
        """Return them; `find_place` returns words for a message that say which they are."""


class SavedInputs:
    """Recovers one call from its inputs, which it keeps.

    Args:
        inputs: returns them.
        round: counts that the second run is compared; None if it is not.
    Cost: the inputs, and one more forward of the call up to the last tensor that autograd saves in it; nothing where that saves
    inputs and parameters alone.
    """

    def __init__(self, inputs: KeptInputs, round: Any = None):
        self.lock = RLock()
        self._inputs = inputs
        self._round = round

    def recover(self, call: RecordedCall, *, ahead: bool = False) -> None:
        inputs = self._inputs.get(lambda: f"before {call.name}")
        call.refill(*inputs)
        if self._round is not None:
            self._round.compare_alone(call, inputs)
        call.end_runs()

    def get_sources(self, call: RecordedCall) -> Iterable[Tensor]:
        return ()  # the graph holds them until the gradient has been queued


class StepOrigin:
    """Where the layers of a step get their last state from: the step is inverted, or run again, which ends their segment.

    Args:
        call: the call that the segment is a part of.
        recoverer: recovers it.
    """

    def __init__(self, call: RecordedCall, recoverer: Recoverer):
        self.lock = recoverer.lock
        self._call = call
        self._recoverer = recoverer

    def recover(self, *, ahead: bool) -> None:
        self._recoverer.recover(self._call, ahead=ahead)

    def get_sources(self) -> Iterable[Tensor]:
        return self._recoverer.get_sources(self._call)


class _Item(NamedTuple):
    """A step, bijection or layer of a segment.

    Args:
        update: how it changes the states.
        call: the call of the step's f, or of the layer; a bijection has none.
        noted: what is remembered of the state that its inversion rebuilds; None if it is not looked at.
    """

    update: Update
    call: RecordedCall | None
    noted: Any


class InvertedSegment:
    """Recovers the calls of consecutive inverted steps or layers from the states after them, which move towards the input.

    Boundary i is before item i of the segment. To recover the call of item i, the states move from boundary i + 1 to i. If
    backward asks for a call elsewhere, the states first move to it: towards the input by inverting, towards the output by
    running forward, or by asking the origin for the last ones.

        item    states                    to go back over it
        step    (w[k-1], w[k])            f runs on w[k], and what it returns gives w[k-1]
        layer   (x,)                      its inverse gives x, and the layer runs on x up to the last tensor that it saves
        layer   two halves (x1, x2)       the same for the half that was put after the other

    A call that saves only its input, its output or parameters need not run to refill them. The states then move over it when
    they are needed before it.

    Args:
        exact: whether inversion rebuilds every bit.
        round: looks at the second runs of this forward; None if nobody does.
        origin: the call that this segment is a part of, which runs again to give states. Then forward keeps none.

    Cost: the states of one boundary, one extra forward of each step or layer.
    """

    def __init__(self, exact: bool, round: Any, origin: StepOrigin | None = None) -> None:
        self.lock = RLock() if origin is None else origin.lock  # one for both, so that no two threads wait for each other
        self.round = round
        self._origin = origin
        self._items: list[_Item] = []
        self._first: int | None = None  # the place of the first call
        self._kept: KeptStates | None = None
        self._has_ended = False
        self._at = 0  # the boundary that the states belong to
        self._needed = 0  # how many items inversion may go over again
        # Whether passed layers may free what their inverses need: not with an origin, which may give the last states again.
        self._frees = False
        self._in_use: list[RecordedCall] = []  # the calls recovered last
        self._watch: Any = None if round is None else round.watch_segment(exact)

    @property
    def is_empty(self) -> bool:
        """Whether it has no call yet."""
        return self._first is None

    def ends_with(self, length: int) -> bool:
        """Return whether it has this many items, and its states are those after the last: then it may go on."""
        return len(self._items) == length == self._at and self._kept is not None

    @property
    def length(self) -> int:
        """The number of its items."""
        return len(self._items)

    def append(self, update: Update, call: RecordedCall | None, before: States) -> None:
        """Add the next step, bijection or layer, in the order of forward.

        Args:
            update: how it changes the states.
            call: the call of the step's f, or of the layer.
            before: the states before it.
        """
        noted = None
        if call is not None:
            self._frees |= update.inverts_first and self._origin is None
            call.place = len(self._items)
            if self._first is None:
                self._first = call.place
            if self._watch is not None:  # the state before the first step is not rebuilt
                is_rebuilt = update.inverts_first or (update.rebuilds and call.place > self._first)
                noted = self._watch.note(call, before[0], is_rebuilt)
        self._items.append(_Item(update, call, noted))

    def end(self, last: States) -> None:
        """Keep the states after the last item, from which recovery will start."""
        self._kept, self._at, self._has_ended = KeptStates(last), len(self._items), True
        self._needed = len(self._items)
        if self._watch is not None:
            self._watch.restart()

    def free_states(self) -> None:
        """Free the states. The origin can give them again."""
        self._kept = None

    def recover(self, call: RecordedCall, *, ahead: bool = False) -> None:
        """Refill `call`, and move the states to the boundary before it.

        They stay after it if it is the first step of the segment, or could be handed over without a run.
        """
        goal = call.place
        if self._kept is None or goal is None:
            self._require_states(call, goal)
        assert goal is not None
        self._free_unused(call, ahead)
        if self._origin is not None and (self._kept is None or self._at < goal):
            self._origin.recover(ahead=ahead)
        while self._at > goal + 1:
            passed = self._items[self._at - 1].call
            self._invert(refill=False)
            if passed is not None:
                passed.end_runs()
                note_inversion(passed.f)
        if self._frees and self._needed > self._at:
            self._free_passed()
        while self._at < goal:
            self._advance()
        self._refill(goal, call)
        if self.round is not None:
            self.round.note_compared()

    def _require_states(self, call: RecordedCall, goal: int | None) -> None:
        if goal is None or (self._origin is None and not self._has_ended):
            raise make_inner_derivative_error(call.name)
        if self._origin is None:
            raise RecoveryError("An earlier backward through this graph has failed. Run the forward again.")

    def _refill(self, goal: int, call: RecordedCall) -> None:
        """Refill the call of item `goal`; the states are at one of its boundaries."""
        update, states = self._items[goal].update, self._states()
        needs_no_state_before = goal == self._first and not update.inverts_first
        if self._at == goal or needs_no_state_before:
            # Before the item f's input is one of the states; after it, the first of the pair.
            call.refill(update.find_input(states, is_after=self._at > goal))
            if self._watch is not None:
                self._watch.compare_refilled(call)
        elif not (
            call.hand_over(output=states[-1])
            if update.inverts_first
            else call.hand_over(update.find_input(states, is_after=True))
        ):
            del states  # the run needs the memory
            self._invert(refill=True)
        if goal == self._first or self._at <= goal:  # else it runs again for the state before it
            call.end_runs()
        if goal == self._first and self._origin is not None:
            self.free_states()

    def get_sources(self, call: RecordedCall) -> Iterable[Tensor]:
        if self._kept is None and self._origin is not None:
            return self._origin.get_sources()
        passed = self._items[call.place or 0 : self._at]
        return *(self._states() if self._kept else ()), *(bits for item in passed for bits in item.update.lost_bits)

    def _free_passed(self) -> None:
        """Free what was needed to invert calls that have been undone, once the graph has freed what they saved.

        Then there cannot be a second backward.
        """
        while self._needed > self._at:
            call = self._items[self._needed - 1].call
            if call is not None:
                if call.is_in_graph:
                    return
                call.free_kept()
            self._needed -= 1

    def _free_unused(self, call: RecordedCall, ahead: bool) -> None:
        """Free what backward has not taken of other calls; if `call` is recovered ahead, keep that of the latest one."""
        in_use = self._in_use
        if call in in_use:
            in_use.remove(call)
        while len(in_use) > (1 if ahead else 0):
            in_use.pop(0).free_refilled()
        in_use.append(call)

    def _invert(self, refill: bool) -> None:
        update, call, noted = self._items[self._at - 1]
        states, watch = self._states(), self._watch
        if call is None:
            self._move(update.invert(states, None), -1)
            return
        if watch is not None:
            watch.begin(states)
        out = None
        if not update.inverts_first:
            x = update.find_input(states, is_after=True)
            stop_early = refill and not update.rebuilds  # a tile of the first step
            check_draws = noted is None or noted.fingerprint is None
            out = call.run_again(x, refill=refill, stop_early=stop_early, check_draws=check_draws)
        rebuilt = update.invert(states, out)
        del out
        self._move(rebuilt, -1)  # at once: the states may have been changed in place
        if watch is not None and not update.rebuilds:
            if refill:
                watch.compare_refilled(call)
        elif watch is not None and noted is not None:
            try:
                watch.compare(noted, call, update, update.find_rebuilt(rebuilt), refill and not update.inverts_first)
            except RecoveryError:
                self.free_states()
                raise
        if update.inverts_first and refill:
            output = states[-1]
            del states
            if not call.hand_over(rebuilt[0], output=output):
                del output  # the run needs the memory
                call.run_again(rebuilt[0], stop_early=True)

    def _advance(self) -> None:
        update, call, *_ = self._items[self._at]
        states = self._states()
        out = None if call is None else call.run_again(update.find_input(states, is_after=False), refill=False)
        if self._watch is not None:
            self._watch.note_advance(update)
        self._move(update.advance(states, out), +1)

    def _move(self, states: States, by: int) -> None:
        self._kept, self._at = KeptStates(states), self._at + by

    def _states(self) -> States:
        assert self._kept is not None, "recovery before the end of forward"
        return self._kept.get(self._find_place)

    def _find_place(self) -> str:
        calls = [item.call for item in self._items[: self._at] if item.call is not None]
        return f"after {calls[-1].name}" if calls else "before the first step"
