"""What refills and unpacks the slots of tensors that the first run of a call has dropped.

Each tensor that autograd saves in a second run refills the slot of one of the first. The graph holds a handle of the call,
which asks for that run and unpacks.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from threading import RLock
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from revzoo.errors import RecoveryError
from revzoo.runtime.compiling import exclude_from_compilation, leave_uncompiled
from revzoo.runtime.random_state import RandomState


class AllRefilled(BaseException):
    """Raised by the pack hook to end a second run early. Not an Exception, which f might catch."""


class RefillHooks:
    """The hooks of one second run.

    The graph of a second run is freed at its end, unless f stores a part of it. It then holds these hooks, which therefore let
    go of the call.

    Args:
        name: what runs, for messages.
        dropped: shapes and dtypes of the tensors that the first run dropped.
        refilled: where to put the tensors, each with its version; None to keep none.
        kept: by slot, tensors of the first run that replace those of this one, with their versions in the first run.
        stops_with: knows when all random numbers are drawn, so that the run may end after the last tensor; None: it may not.
        is_fake: whether the run has no values. Where it has some, tensors without are those of a function that f traces
            (torch.cond, map), which keeps them itself.
    """

    def __init__(
        self,
        name: str,
        dropped: Sequence[tuple[torch.Size, torch.dtype]],
        refilled: dict[int, tuple[Tensor, int]] | None,
        stops_with: RandomState | None,
        kept: Mapping[int, tuple[Tensor, int]] = MappingProxyType({}),
        is_fake: bool = False,
    ):
        self._name = name
        self._dropped = dropped
        self._count = len(dropped)
        self._refilled = refilled
        self._kept = kept
        self._stops_with = stops_with
        self._is_fake = is_fake
        self._detach = detach if torch._C._len_torch_dispatch_stack() else Tensor.detach
        self.error: RecoveryError | None = None  # TorchScript would hide it
        self.seen = 0
        self.has_refilled_all = False

    @leave_uncompiled
    def pack(self, tensor: Tensor) -> int | Tensor:
        if tensor.__class__ is FakeTensor and not self._is_fake:
            return tensor.detach()
        slot = self.seen
        if slot == self._count and self.has_refilled_all:  # f has caught what should have ended the run
            raise AllRefilled
        if slot == self._count or self._dropped[slot] != (tensor.shape, tensor.dtype):
            saved = f"a tensor {tuple(tensor.shape)} of {tensor.dtype}"
            self.error = make_difference_error(self._name, self._dropped, slot, saved)
            raise self.error
        self.seen = slot + 1
        if self._refilled is not None:
            version = tensor._version
            if self._kept and slot in self._kept:
                tensor, version = self._kept[slot]
            self._refilled[slot] = self._detach(tensor), version
        # An operation that draws may have saved the tensor that it is about to fill (RReLU), so wait for the last draw.
        if self.seen == self._count and self._stops_with is not None and not self._stops_with.has_to_draw:
            self.has_refilled_all = True
            raise AllRefilled
        return slot

    def unpack(self, slot: int | Tensor) -> Tensor:
        """Return a tensor for which f itself asks, as it differentiates inside its own forward."""
        if isinstance(slot, Tensor):
            return slot
        if not self._dropped:
            raise RecoveryError(
                f"A result of the second run of {self._name} is differentiated, which a forward hook or f itself has kept, and "
                "which has no graph any more. Read what they capture before backward, add it to the loss, or set the schedule "
                f"of {self._name} to 'store'."
            )
        if self._refilled is None:
            raise make_inner_derivative_error(self._name)
        return self._refilled[slot][0]

    def end(self) -> None:
        self._dropped, self._refilled, self._kept, self._stops_with, self.error = (), None, {}, None, None


class Handle:
    """What the graph holds of a call: it unpacks what the call has dropped. `Lookahead` recovers the call by it.

    Only the graph keeps it alive: look-ahead, and the handle of the call after it, refer to it weakly.

    Args:
        call: the call.
        recoverer: gets its inputs back.
    """

    def __init__(self, call: Any, recoverer: "Recoverer"):
        self.call = call  # a RecordedCall
        self.recoverer = recoverer
        self._lookahead = lookahead = call.forward.lookahead
        self._next = None if lookahead is None else lookahead.latest  # what backward asks for after this call

    def unpack(self, slot: int | Tensor) -> Tensor:
        """Return the tensor dropped in this slot; recover the call first if it has not been refilled."""
        if isinstance(slot, Tensor):
            return slot
        if self._lookahead is not None and self._lookahead.finish(self):
            self._start_next()
        tensor = self.call.take(slot)
        return self._recover(slot) if tensor is None else tensor

    @exclude_from_compilation
    def _recover(self, slot: int) -> Tensor:
        if self._lookahead is not None:
            self._lookahead.forget()
        tensor: Tensor | None = None
        while tensor is None:  # another thread that differentiates the same graph may take it at once
            with self.recoverer.lock:
                if self.call.is_running:
                    self.call.recover_inside()
                else:
                    self._recover_call()
                tensor = self.call.take(slot)
        if self._lookahead is not None:
            self._start_next()
        return tensor

    @exclude_from_compilation
    def _start_next(self) -> None:
        if self._lookahead is not None and self._next is not None:
            self._lookahead.start(self._next())

    def recover_ahead(self) -> None:
        """Refill what the call dropped, before backward asks for it."""
        with self.recoverer.lock:
            self._recover_call(ahead=True)

    def _recover_call(self, ahead: bool = False) -> None:
        # The user's backward may be in inference mode, but a second run needs a graph.
        with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext():
            self.recoverer.recover(self.call, ahead=ahead)

    @property
    def needs_no_rewinding(self) -> bool:
        """Whether its recovery has no use for random streams."""
        call = self.call
        while call is not None and call.conditions.random.needs_no_rewinding:
            call = call.outer
        return call is None

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self.call.forward.device


class Recoverer(Protocol):
    """Gets the inputs of a recorded call back and runs it again."""

    @property
    def lock(self) -> RLock:
        """Of several threads that differentiate one graph, one recovers at a time."""

    def recover(self, call: Any, *, ahead: bool = False) -> None:
        """Refill what `call` dropped.

        Args:
            call: the call.
            ahead: whether the gradient of the call recovered before this one is still being computed.
        """

    def get_sources(self, call: Any) -> Iterable[Tensor]:
        """Return the tensors that recovering `call` reads and may free."""


def make_difference_error(name: str, dropped: Sequence[tuple[torch.Size, torch.dtype]], slot: int, saved: str) -> RecoveryError:
    """Return the error of a second run in which autograd saves other tensors than in the first.

    Args:
        name: what ran.
        dropped: shapes and dtypes of the tensors of the first run.
        slot: the first one that differs.
        saved: words for what was saved in its place.
    """
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


def detach(tensor: Tensor) -> Tensor:
    """Detach a tensor, which no dispatch mode has to see where it is an ordinary one."""
    if tensor.__class__ is not Tensor or not torch._C._len_torch_dispatch_stack():
        return tensor.detach()
    with torch._C._DisableTorchDispatch():
        return tensor.detach()


def make_inner_derivative_error(name: str) -> RecoveryError:
    """Return the error of a call that is asked for before its forward has ended."""
    return RecoveryError(
        f"{name} differentiates inside its own forward, before backward can recover anything. Set its schedule to 'store'."
    )
