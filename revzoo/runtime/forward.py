"""What all calls of one forward share, found once when it begins."""

import os
import sys
from collections.abc import Sequence
from contextvars import ContextVar
from copy import copy
from threading import RLock, get_ident
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward

from revzoo.errors import RecoveryError
from revzoo.runtime.inventory import Pattern
from revzoo.runtime.nested import tensors_in
from revzoo.runtime.random_state import find_generators
from revzoo.runtime.settings import Settings

# Threads share random streams, buffers and settings of a device, so they take turns.
_turns: dict[torch.device, RLock] = {}  # while a step runs in one thread, no other runs a step on the same device
_lent: dict[torch.device, RLock] = {}  # for threads that the owner of a turn waits for
_owners: dict[RLock, int] = {}


def _forget_turns() -> None:
    for each in (_turns, _lent, _owners):
        each.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_turns)  # the thread that holds one does not exist in the child
_LONGEST_WAIT_SECONDS = 600.0


def take_turn(device: torch.device) -> RLock:
    """Wait until no other thread runs a step on the device; return what to release.

    Where processes communicate, threads do not wait: a collective of one could be waiting for the other.

    Raises:
        RecoveryError: another thread keeps running a step.
    """
    turn = _turns.get(device) or _turns.setdefault(device, RLock())
    if turn.acquire(False):
        _owners[turn] = get_ident()
        return turn
    if _waits_for_backward(_owners.get(turn)):  # f differentiates inside, and this is autograd's thread of the device
        turn = _lent.get(device) or _lent.setdefault(device, RLock())
    elif processes_communicate():
        turn = RLock()
    if not turn.acquire(timeout=_LONGEST_WAIT_SECONDS):
        raise RecoveryError(
            f"A step has waited {_LONGEST_WAIT_SECONDS:g} seconds for a step that another thread runs on {device}. Run their "
            "forwards and backwards in one thread, or in two processes."
        )
    return turn


def _waits_for_backward(thread: int | None) -> bool:
    """Return whether a thread waits for the end of a backward that other threads run."""
    # No variable holds a frame: it could be the one of this call, which would then keep itself and its callers.
    return getattr(sys._current_frames().get(cast(int, thread)), "f_code", None) is _engine_run_backward.__code__


def runs_step() -> bool:
    """Return whether this thread is running a step."""
    return any(cast(Any, turn)._is_owned() for turn in (*_turns.values(), *_lent.values()))


def processes_communicate() -> bool:
    """Return whether this process is one of several that torch.distributed connects."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized()


second_run = ContextVar("second_run", default=False)  # whether a call is run again: what is recorded then is thrown away


class Forward:
    """The surroundings of the calls of one forward: settings, side input, random streams, observers.

    Its calls are made inside a `with` statement, during which no other thread runs steps on the device.

    Args:
        x: an input of the forward, which tells the device.
        side: read-only second argument of every call.
        lookahead: recovers calls ahead of backward.
        grid: of the states; None in floating point.
        keep: names the submodules whose outputs are kept (`kept_regions.py`).

    Attributes:
        round: looks at second runs: compares them, or only shows states to an observer; None if nobody looks.
    """

    def __init__(self, x: Tensor, *, side: Any = None, lookahead: Any = None, grid: Any = None, keep: Sequence[Pattern] = ()):
        self.device = x.device
        self.devices = frozenset((x.device, torch.device("cpu")))
        self.settings = Settings(x.device)
        self.generators = find_generators((x.device,))
        self.lookahead = lookahead
        self.grid = grid
        self.keep = keep
        self.round: Any = None
        self.is_one_of_several = processes_communicate()
        self._take_side(side)

    def with_side(self, side: Any) -> "Forward":
        """Return the same with another side input, of which the calls of a tile are made."""
        other = copy(self)
        other._take_side(side)
        return other

    def _take_side(self, side: Any) -> None:
        self.side = side
        self.side_tensors = [] if side is None else [t for t in tensors_in(side) if not t.is_inference()]

    def __enter__(self) -> "Forward":
        self._turn = take_turn(self.device)
        return self

    def __exit__(self, *error: object) -> None:
        self._turn.release()
