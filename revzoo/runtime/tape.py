"""What a forward call records so that backward can rebuild the tensors that were dropped.

The forward of a step runs as ordinary autograd code under `saved_tensors_hooks`: the pack hook drops each tensor that autograd
wants to save and leaves the number of its slot in the call. When backward unpacks the first slot of a call, the call is run
again. That second run refills all slots of the call and, for an inverted step, also gives the state before it. The graph stays
PyTorch's own, so gradients go where they always go: `torch.autograd.grad`, `retain_graph`, hooks, DDP and FSDP see nothing
unusual.

    RecordedCall     one call of one function, the tensors it dropped, and how to run it again (`replay.py`)
    SavedInputs      recovers one call from its own inputs, which it keeps        (modes `recompute` and `selective`)
    InvertedSegment  recovers the calls of consecutive inverted steps from one pair of states         (mode `invert`)

References point one way: the graph holds the hooks of its calls, a hook its RecordedCall and what recovers that (SavedInputs or
InvertedSegment), and a segment all its calls. So everything is freed with the graph, without the garbage collector. A segment
holds exactly one pair of states at any time: after forward the last pair, which is the chain's own output if the segment ends
the chain; in backward the pair recovered last.

Known inefficiency: a second backward through a retained graph runs the chain forward again to get back to its end.

Source: the hooks are `torch.autograd.graph.saved_tensors_hooks`, as in non-reentrant `torch.utils.checkpoint`; the
reconstruction is Gomez et al. 2017, Algorithm 1.
"""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from threading import RLock
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from revzoo.errors import RecoveryError
from revzoo.runtime.compiling import exclude_from_compilation, is_compiled, leave_uncompiled
from revzoo.runtime.coupling import Pair
from revzoo.runtime.drift import Rounding
from revzoo.runtime.missing import NeedsFullRun
from revzoo.runtime.replay import Replay
from revzoo.runtime.selective import KeptOutputs
from revzoo.runtime.settings import Settings
from revzoo.runtime.tripwire import (
    Fingerprint,
    Watch,
    is_watching,
    judge_arrived,
    send_comparisons,
    take_fingerprint,
    unwatched,
)

# Largest relative difference between two runs on the same input, whose kernels may add up in another order.
_LARGEST_DIFFERENCE = 1e-2


class _AllRefilled(BaseException):
    """Raised by the pack hook to end a second run early. Not an Exception, which f might catch."""


class RecordedCall:
    """One call of `f` under hooks that drop what autograd saves.

    Args:
        f: the step or node.
        name: its name, for messages.
        settings: the settings of PyTorch under which it is called.
        side: read-only second argument of f, or None for an f without one.
        selective: keep the outputs of compute-intensive operations from the first run to the second. Has no effect where f is
            compiled: its operations cannot be observed.
        watched: whether the tensors saved last are compared when they have been refilled. Not needed where the state that
            follows from f's output is compared.
    """

    def __init__(
        self,
        f: Callable[..., Any],
        name: str,
        settings: Settings,
        side: Any = None,
        *,
        selective: bool = False,
        watched: bool = True,
    ):
        self._f = f
        self.name = name
        self._settings = settings
        self._side = side
        self._kept_outputs = KeptOutputs() if selective and not is_compiled(f) else None
        self._watched = watched and is_watching()
        self._dropped: list[tuple[torch.Size, torch.dtype]] = []
        self._refilled: dict[int, tuple[Tensor, int]] = {}  # by slot: the tensor and its version
        self._fingerprints: list[tuple[int, Fingerprint]] = []  # of the tensors saved last, by slot
        self._requires_grad: list[bool] = []
        self.place: int | None = None  # among the items of its segment

    def first_run(self, recoverer: "Recoverer", *inputs: Tensor) -> Any:
        """Run f on `inputs` and drop what autograd saves; backward will ask `recoverer` to recover this call."""
        self._requires_grad = [x.requires_grad for x in inputs]
        self._replay = Replay(self._f, inputs[0].device, self.name, self._settings, self._side)
        dropped, kept_outputs = self._dropped, self._kept_outputs
        watched, moving_sizes = self._watched, self._replay.moving_sizes
        latest: deque[tuple[int, Tensor]] = deque(maxlen=2)  # two, since the last is often a weight

        def is_telling(tensor: Tensor) -> bool:
            """Return whether a tensor can show a difference: no weight, no moving statistic, no output that is kept anyway."""
            if isinstance(tensor._base if tensor._is_view() else tensor, nn.Parameter) or tensor.numel() in moving_sizes:
                return False
            return kept_outputs is None or not kept_outputs.holds(tensor)

        def pack(tensor: Tensor) -> int:
            slot = len(dropped)
            dropped.append((tensor.shape, tensor.dtype))
            if kept_outputs is not None:
                kept_outputs.mark_needed(tensor)
            if watched and is_telling(tensor):
                latest.append((slot, tensor))
            return slot

        def unpack(slot: int) -> Tensor:
            return self._unpack(slot, recoverer)

        def run() -> Any:
            with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                if kept_outputs is None:
                    return self._call(*inputs)
                with unwatched(), kept_outputs.record():
                    out = self._call(*inputs)
                kept_outputs.discard_unneeded()
                return out

        out = self._replay.run_first(run)
        taken = ((slot, take_fingerprint(tensor)) for slot, tensor in latest)
        self._fingerprints = [(slot, fingerprint) for slot, fingerprint in taken if fingerprint is not None]
        latest.clear()  # the hooks live as long as the graph
        return out

    def run_again(self, *inputs: Tensor, refill: bool = True, stop_early: bool = False, check_draws: bool = True) -> Any:
        """Run f once more on detached `inputs`, refilling what was dropped; return its detached output.

        Args:
            inputs: the inputs of the first run, recovered.
            refill: whether to keep the tensors that autograd saves. False where only the output is needed.
            stop_early: end the run when the last dropped tensor has been refilled, and return None.
            check_draws: whether `require_same_draws` will be asked about this run.
        """
        inputs = tuple(x.detach().requires_grad_(needs) for x, needs in zip(inputs, self._requires_grad, strict=True))
        hooks = _RefillHooks(self.name, self._dropped, self._refilled if refill else None, self._replay if stop_early else None)

        def run() -> Any:
            with (
                unwatched(),
                torch.enable_grad(),
                torch.autograd.graph.saved_tensors_hooks(hooks.pack, hooks.unpack),
                nullcontext() if self._kept_outputs is None else self._kept_outputs.replay(),
            ):
                return self._call(*inputs)

        try:
            out = self._replay.run_again(run, check_draws)
        except (Exception, NeedsFullRun, _AllRefilled):
            if hooks.has_refilled_all:  # TorchScript wraps what ends the run
                return None
            if self._kept_outputs is None or not self._kept_outputs.handed_out:
                raise
            self._refilled.clear()
            return self.run_again(*inputs, refill=refill, stop_early=stop_early, check_draws=check_draws)
        finally:
            hooks.end()
        if hooks.seen != len(self._dropped):
            raise _runs_differently(self.name, self._dropped, hooks.seen, "nothing")
        return None if stop_early else out.detach()

    def _unpack(self, slot: int, recoverer: "Recoverer") -> Tensor:
        """Return the tensor dropped in this slot; recover the call first if it has not been refilled."""
        refilled = self._refilled.pop(slot, None)
        tensor, version = self._recover(slot, recoverer) if refilled is None else refilled
        if tensor._version != version:
            raise RecoveryError(
                f"{self.name} modifies a tensor {tuple(tensor.shape)} in place that its gradient needs. Replace the in-place "
                "operation (mul_, +=) by one that returns a new tensor."
            )
        return tensor

    @exclude_from_compilation
    def _recover(self, slot: int, recoverer: "Recoverer") -> tuple[Tensor, int]:
        refilled = None
        while refilled is None:  # another thread that differentiates the same graph may take it at once
            # A second run needs a graph, which it does not get where the user's backward is in inference mode.
            with recoverer.lock, torch.inference_mode(False):
                recoverer.recover(self)
                refilled = self._refilled.pop(slot, None)
        return refilled

    def free_refilled(self) -> None:
        """Free the refilled tensors that were not unpacked; they can be recovered again."""
        self._refilled.clear()

    @property
    def spacing(self) -> float:
        """Relative spacing of the coarsest numbers that f computes with, as far as its parameters and the settings show."""
        return max(self._settings.spacing, self._replay.spacing)

    def compare_refilled(self, watch: Watch) -> None:
        """Compare the tensors saved last with those of the first run.

        Raises:
            RecoveryError: they differ by more than rounding explains.
        """
        tolerance = max(_LARGEST_DIFFERENCE, 16 * self.spacing)
        has_compared = False
        for slot, fingerprint in self._fingerprints:
            tensor, version = self._refilled.get(slot, (None, 0))  # another thread may have taken it
            if tensor is not None and tensor._version == version:
                has_compared |= watch.compare(self.name, fingerprint, tensor, tolerance, of_state=False)
        if not has_compared:
            self.require_same_draws()

    def require_same_draws(self) -> None:
        """Raise RecoveryError if the second run drew another amount of random numbers.

        Only to be asked where no values are compared: another thread that draws, such as one that loads data, can move the
        random stream while f draws nothing.
        """
        if not self._replay.drew_the_same:
            raise RecoveryError(
                f"{self.name} ran differently the second time: it drew another amount of random numbers. Its function must "
                "depend on its input, parameters and torch's random stream alone, and no other thread may draw meanwhile; "
                "otherwise set its schedule to 'store'."
            )

    def _call(self, *inputs: Tensor) -> Any:
        return self._f(*inputs) if self._side is None else self._f(*inputs, self._side)


class _RefillHooks:
    """The hooks of one second run.

    The graph of a second run is freed at its end, unless f stores a part of it. It then holds these hooks, which therefore let
    go of the call.
    """

    def __init__(
        self,
        name: str,
        dropped: Sequence[tuple[torch.Size, torch.dtype]],
        refilled: dict[int, tuple[Tensor, int]] | None,
        stops_with: Replay | None,
    ):
        self._name = name
        self._dropped = dropped
        self._refilled = refilled
        self._stops_with = stops_with
        self.seen = 0
        self.has_refilled_all = False

    @leave_uncompiled
    def pack(self, tensor: Tensor) -> None:
        if self.has_refilled_all:  # f has caught what should have ended the run
            raise _AllRefilled
        slot, self.seen = self.seen, self.seen + 1
        if slot >= len(self._dropped) or self._dropped[slot] != (tensor.shape, tensor.dtype):
            raise _runs_differently(self._name, self._dropped, slot, f"a tensor {tuple(tensor.shape)} of {tensor.dtype}")
        if self._refilled is not None:
            self._refilled[slot] = _detach(tensor), tensor._version
        # An operation that draws may have saved the tensor that it is about to fill (RReLU), so wait for the last draw.
        if self._stops_with is not None and self.seen == len(self._dropped) and self._stops_with.has_drawn_all:
            self.has_refilled_all = True
            raise _AllRefilled

    def unpack(self, _: None) -> Tensor:
        raise _differentiates_inside(self._name)

    def end(self) -> None:
        self._dropped, self._refilled, self._stops_with = (), None, None


def _runs_differently(name: str, dropped: Sequence[tuple[torch.Size, torch.dtype]], slot: int, saved: str) -> RecoveryError:
    expected = "nothing more"
    if slot < len(dropped):
        shape, dtype = dropped[slot]
        expected = f"a tensor {tuple(shape)} of {dtype}"
    return RecoveryError(
        f"{name} ran differently the second time: as tensor {slot} autograd saved {expected} in forward and {saved} in "
        "recovery. Its function must depend on its input, parameters and torch's random stream alone, not on a cache that "
        "another call filled (parametrize.cached), and requires_grad must not change in between; otherwise set its schedule "
        "to 'store'."
    )


def _detach(tensor: Tensor) -> Tensor:
    """Detach a tensor, which no dispatch mode has to see where it is an ordinary one."""
    if tensor.__class__ is not Tensor or not torch._C._len_torch_dispatch_stack():
        return tensor.detach()
    with torch._C._DisableTorchDispatch():
        return tensor.detach()


class Recoverer(Protocol):
    """Gets the inputs of a recorded call back and runs it again."""

    @property
    def lock(self) -> RLock:
        """Of several threads that differentiate one graph, one recovers at a time."""

    def recover(self, call: RecordedCall) -> None:
        """Refill what `call` dropped."""


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

    def recover(self, call: RecordedCall) -> None:
        judge_arrived()
        call.run_again(*(x.get() for x in self._inputs), stop_early=True)
        call.compare_refilled(Watch())


class PairUpdate(Protocol):
    """One step or bijection as an `InvertedSegment` sees it: how it changes the pair of states, and how to undo that."""

    b: float

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
        self._current: RecordedCall | None = None  # the call recovered last
        self._watch = Watch()
        self._must_note_sizes = not exact  # of the pair kept in forward, by which rounding errors are judged
        self._rounding = Rounding()

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

    def recover(self, call: RecordedCall) -> None:
        """Refill `call`, and move the pair to the boundary before it, unless it is the first of the segment."""
        judge_arrived()
        goal = call.place
        if goal is None or self._pair is None:
            raise _differentiates_inside(call.name)
        if self._current is not None and self._current is not call:
            self._current.free_refilled()
        self._current = call
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
        if goal == 0:
            send_comparisons()

    def _invert(self, refill: bool) -> None:
        update, call, fingerprint = self._items[self._at - 1]
        pair = self._states()
        if call is None:
            self._move(update.invert(pair, None), -1)
            return
        if self._must_note_sizes:
            self._must_note_sizes = False
            for state in pair:
                self._watch.note_size(state)
        out = call.run_again(pair[0], refill=refill, check_draws=fingerprint is None)
        rebuilt = update.invert(pair, out)
        del out
        self._rounding.step(pair[0].dtype, call.spacing, update.b)
        if fingerprint is None:
            call.require_same_draws()
        else:
            self._watch.compare(call.name, fingerprint, rebuilt[0], 0.0 if self._exact else self._rounding.tolerance)
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


def _differentiates_inside(name: str) -> RecoveryError:
    return RecoveryError(
        f"{name} differentiates inside its own forward, before backward can recover anything. Set its schedule to 'store'."
    )
