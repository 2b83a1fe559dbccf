"""Threads that run steps take turns: they share random streams, buffers and settings of a device."""

import os
from threading import RLock
from typing import Any, cast

import torch

from revzoo.errors import RecoveryError

_turns: dict[torch.device, RLock] = {}  # while a step runs in one thread, no other runs a step on the same device
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_turns.clear)  # the thread that holds one does not exist in the child
_LONGEST_WAIT_SECONDS = 600.0


def take_turn(device: torch.device) -> RLock:
    """Wait until no other thread runs a step on the device; return what to release.

    Where processes communicate, threads do not wait: a collective of one could be waiting for the other.

    Raises:
        RecoveryError: another thread keeps running a step.
    """
    turn = _turns.get(device) or _turns.setdefault(device, RLock())
    if turn.acquire(False):
        return turn
    if processes_communicate():
        turn = RLock()
    if not turn.acquire(timeout=_LONGEST_WAIT_SECONDS):
        raise RecoveryError(
            f"A step has waited {_LONGEST_WAIT_SECONDS:g} seconds for a step that another thread runs on {device}. Run their "
            "forwards and backwards in one thread, or in two processes."
        )
    return turn


def runs_step() -> bool:
    """Return whether this thread is running a step."""
    return any(cast(Any, turn)._is_owned() for turn in list(_turns.values()))


def processes_communicate() -> bool:
    """Return whether this process is one of several that torch.distributed connects."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized()
