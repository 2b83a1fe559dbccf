"""What a forward call records so that backward can rebuild the tensors that were dropped.

The forward of a step runs as ordinary autograd code under `saved_tensors_hooks`: the pack hook drops each tensor that autograd
wants to save and leaves a `Handle` in its place. When backward unpacks the first handle of a call, the call is run again. That
second run refills all handles of the call and, for an inverted step, also gives the state before it. The graph stays PyTorch's
own, so gradients go where they always go: `torch.autograd.grad`, `retain_graph`, hooks, DDP and FSDP see nothing unusual.

    RecordedCall     one call of one function, the tensors it dropped, and how to run it again (`replay.py`)
    SavedInputs      recovers one call from its own inputs, which it keeps        (modes `recompute` and `selective`)
    InvertedSegment  recovers the calls of consecutive inverted steps from one pair of states         (mode `invert`)

References point one way, graph -> Handle -> (SavedInputs | InvertedSegment) -> RecordedCall, so everything is freed with the
graph, without the garbage collector. A segment of inverted steps holds exactly one pair of states at any time: after forward
the last pair, which is the chain's own output if the segment ends the chain; in backward the pair recovered last.

Known inefficiency: a second backward through a retained graph runs the chain forward again to get back to its end.

Source: the hooks are `torch.autograd.graph.saved_tensors_hooks`, as in non-reentrant `torch.utils.checkpoint`; the
reconstruction is Gomez et al. 2017, Algorithm 1.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from revzoo.errors import RecoveryError
from revzoo.runtime.compiling import is_compiled
from revzoo.runtime.coupling import Pair
from revzoo.runtime.replay import Replay
from revzoo.runtime.selective import KeptOutputs


class _AllRefilled(Exception):
    """Raised by the pack hook to end a second run early, once every dropped tensor has been refilled."""


class RecordedCall:
    """One call of `f` under hooks that drop what autograd saves.

    Args:
        f: the step or node.
        name: its name, for messages.
        side: read-only second argument of f, or None for an f without one.
        selective: keep the outputs of compute-intensive operations from the first run to the second. Has no effect where f is
            compiled: its operations cannot be observed.
    """

    def __init__(self, f: Callable[..., Any], name: str, side: Any = None, *, selective: bool = False):
        self._f = f
        self.name = name
        self._side = side
        self._kept_outputs = KeptOutputs(name) if selective and not is_compiled(f) else None
        self._dropped: list[tuple[torch.Size, torch.dtype]] = []
        self._refilled: dict[int, tuple[Tensor, int]] = {}  # by slot: the tensor and its version
        self._requires_grad: list[bool] = []

    def first_run(self, recoverer: "Recoverer", *inputs: Tensor) -> Any:
        """Run f on `inputs` and drop what autograd saves; backward will ask `recoverer` to recover this call."""
        self._requires_grad = [x.requires_grad for x in inputs]
        self._replay = Replay(self._f, inputs[0].device, self.name, self._side)

        def pack(tensor: Tensor) -> Handle:
            self._dropped.append((tensor.shape, tensor.dtype))
            if self._kept_outputs is not None:
                self._kept_outputs.mark_needed(tensor)
            return Handle(recoverer, self, len(self._dropped) - 1)

        with (
            torch.autograd.graph.saved_tensors_hooks(pack, Handle.unpack),
            nullcontext() if self._kept_outputs is None else self._kept_outputs.record(),
        ):
            out = self._run(*inputs)
        if self._kept_outputs is not None:
            self._kept_outputs.discard_unneeded()
        self._replay.end_first_run()
        return out

    def run_again(self, *inputs: Tensor, refill: bool = True, stop_early: bool = False) -> Any:
        """Run f once more on detached `inputs`, refilling the handles; return its detached output.

        Args:
            inputs: the inputs of the first run, recovered.
            refill: whether to keep the tensors that autograd saves for the handles. False where only the output is needed.
            stop_early: end the run when the last dropped tensor has been refilled, and return None.
        """
        seen = 0

        def pack(tensor: Tensor) -> None:
            nonlocal seen
            if seen >= len(self._dropped) or self._dropped[seen] != (tensor.shape, tensor.dtype):
                raise self._runs_differently(seen, f"a tensor {tuple(tensor.shape)} of {tensor.dtype}")
            if refill:
                self._refilled[seen] = tensor.detach(), tensor._version
            seen += 1
            if stop_early and seen == len(self._dropped):
                raise _AllRefilled

        def unpack(_: None) -> Tensor:
            raise _differentiates_inside(self.name)

        inputs = tuple(x.detach().requires_grad_(needs) for x, needs in zip(inputs, self._requires_grad, strict=True))
        try:
            with (
                self._replay.again(),
                torch.enable_grad(),
                torch.autograd.graph.saved_tensors_hooks(pack, unpack),
                nullcontext() if self._kept_outputs is None else self._kept_outputs.replay(),
            ):
                out = self._run(*inputs)
        except _AllRefilled:
            return None
        if seen != len(self._dropped):
            raise self._runs_differently(seen, "nothing")
        return None if stop_early else out.detach()

    def unpack(self, slot: int, recoverer: "Recoverer") -> Tensor:
        """Return the tensor dropped as number `slot`; recover the call first if it has not been refilled."""
        if slot not in self._refilled:
            recoverer.recover(self)
        tensor, version = self._refilled.pop(slot)
        if tensor._version != version:
            raise RecoveryError(
                f"{self.name} modifies a tensor {tuple(tensor.shape)} in place that its gradient needs. Replace the in-place "
                "operation (mul_, +=) by one that returns a new tensor."
            )
        return tensor

    def free_refilled(self) -> None:
        """Free the refilled tensors that were not unpacked; they can be recovered again."""
        self._refilled.clear()

    def _run(self, *inputs: Tensor) -> Any:
        return self._f(*inputs) if self._side is None else self._f(*inputs, self._side)

    def _runs_differently(self, slot: int, saved: str) -> RecoveryError:
        expected = "nothing more"
        if slot < len(self._dropped):
            shape, dtype = self._dropped[slot]
            expected = f"a tensor {tuple(shape)} of {dtype}"
        return RecoveryError(
            f"{self.name} ran differently the second time: as tensor {slot} autograd saved {expected} in forward and {saved} "
            f"in recovery. Its function must depend on its input, parameters and torch's random stream alone, and "
            f"requires_grad must not change in between; otherwise set its schedule to 'store'."
        )


class Recoverer(Protocol):
    """Gets the inputs of a recorded call back and runs it again."""

    def recover(self, call: RecordedCall) -> None:
        """Refill every handle of `call`."""


class Handle(NamedTuple):
    """What autograd keeps in place of a dropped tensor."""

    recoverer: Recoverer
    call: RecordedCall
    slot: int

    def unpack(self) -> Tensor:
        if torch.is_grad_enabled():
            raise RecoveryError(
                f"create_graph=True needs the tensors that {self.call.name} dropped as part of a graph. Set the schedule of "
                "every step and node you differentiate twice to 'store'."
            )
        return self.call.unpack(self.slot, self.recoverer)


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
        self._inputs = [State(x) for x in inputs]

    def recover(self, call: RecordedCall) -> None:
        call.run_again(*(x.get() for x in self._inputs), stop_early=True)


class PairUpdate(Protocol):
    """One step or bijection as an `InvertedSegment` sees it: how it changes the pair of states, and how to undo that."""

    def advance(self, pair: Pair, out: Tensor | None) -> Pair: ...

    def invert(self, pair: Pair, out: Tensor | None) -> Pair: ...


class InvertedSegment:
    """Recovers the calls of consecutive inverted steps from one pair of states, which moves along the chain.

    Boundary i is in front of item i of the segment, so `_pair` is (w[i-1], w[i]) there. To recover the call of item i, the pair
    moves from boundary i + 1 to i. If backward asks for a call elsewhere, the pair first moves to it: towards the input by
    inverting, towards the output by running forward.

    Cost: one pair of states, one extra forward of each step.
    """

    def __init__(self) -> None:
        self._items: list[tuple[PairUpdate, RecordedCall | None]] = []  # a bijection has no call
        self._pair: tuple[State, State] | None = None
        self._at = 0
        self._current: RecordedCall | None = None

    def append(self, update: PairUpdate, call: RecordedCall | None) -> None:
        """Add the next step or bijection, in the order of forward."""
        self._items.append((update, call))

    def end(self, pair: Pair) -> None:
        """Keep the states after the last step, from which recovery will start."""
        self._pair, self._at = (State(pair[0]), State(pair[1])), len(self._items)

    def recover(self, call: RecordedCall) -> None:
        """Refill `call`, and move the pair to the boundary before it, unless it is the first of the segment."""
        goal = next((i for i, (_, other) in enumerate(self._items) if other is call), None)
        if goal is None:
            raise _differentiates_inside(call.name)
        if self._current is not None and self._current is not call:
            self._current.free_refilled()
        self._current = call
        while self._at > goal + 1:
            self._invert(refill=False)
        while self._at < goal:
            self._advance()
        if self._at == goal:
            call.run_again(self._states()[1], stop_early=True)
        elif goal == 0:
            call.run_again(self._states()[0], stop_early=True)  # the state before the first step is not needed
        else:
            self._invert(refill=True)

    def _invert(self, refill: bool) -> None:
        update, call = self._items[self._at - 1]
        pair = self._states()
        out = None if call is None else call.run_again(pair[0], refill=refill)
        self._move(update.invert(pair, out), -1)

    def _advance(self) -> None:
        update, call = self._items[self._at]
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
