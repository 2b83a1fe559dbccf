"""Look-ahead: recovering the next call while the gradient of the present one is computed.

Backward asks for the calls of a forward in reverse order, so the next one is known. With N calls:

    recover(N)
    gradient(N)      meanwhile recover(N - 1)
    ...
    gradient(2)      meanwhile recover(1)
    gradient(1)

Where the recovery runs depends on the device, and on what is around backward:

    an accelerator           on a side stream; the host waits for nothing. In a CUDA graph it becomes a branch
    cpu                      in a thread of its own
    under a dispatch mode    at once, in the thread of backward, so that the mode sees all of it: one that counts bytes counts
                             those of two calls

A recovery must not disturb the gradient that is computed meanwhile. Where it could, calls are recovered one by one as without
look-ahead, and a warning says why.

Cost: the refilled tensors of one more call.

Source: PaReprop, Zhu and Mangalam 2023. In its code (minREV, RevSwin) the order is tied to pairs of blocks, and wrong for odd
numbers.
"""

import os
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from functools import cache
from threading import Lock
from typing import Any, Literal, cast
from weakref import ref

import torch

from revzoo.device import has_streams, is_sharded
from revzoo.errors import InputError
from revzoo.runtime.compiling import exclude_from_compilation, is_exporting
from revzoo.runtime.forward import processes_communicate, runs_step
from revzoo.runtime.random_state import leave_alone
from revzoo.runtime.refill_hooks import Handle
from revzoo.runtime.tripwire import judge_deferred

LookaheadOption = Literal[0, 1]


def check_lookahead(lookahead: LookaheadOption) -> LookaheadOption:
    """Return the number of calls that are recovered ahead of backward. InputError: neither 0 nor 1."""
    if type(lookahead) is not int or lookahead not in (0, 1):
        raise InputError(f"lookahead is 0 or 1, the number of steps recovered ahead of backward. Received: {lookahead!r}.")
    return lookahead


def begin_lookahead(lookahead: LookaheadOption) -> "Lookahead | None":
    """Return what recovers the calls of one forward ahead of backward; None for nothing."""
    if not lookahead or not torch.is_grad_enabled() or is_exporting():
        return None
    return _make_lookahead()


class Lookahead:
    """Recovers ahead of backward, for the calls of one forward. At most one recovery is under way."""

    def __init__(self) -> None:
        self.latest: ref[Handle] | None = None  # the call noted last, which backward asks for after the one noted next
        self.follows_tracing = False  # whether a call traces what it runs: its second run and its gradient do, too
        self._started: _Started | None = None
        self._lock = Lock()
        self._task = -1  # the backward that must end with nothing under way

    def follow(self, handle: Handle) -> None:
        """Note the next call, in the order of forward."""
        self.latest = ref(handle)

    def start(self, handle: Handle | None) -> None:
        """Begin to recover a call, unless that could disturb the gradient."""
        if handle is None or (executor := _choose_executor(handle)) is None:
            return
        with self._lock:  # another thread may differentiate the same graph
            if self._started is None:
                self._call_after_backward()
                self._started = executor(handle)

    def finish(self, handle: Handle) -> bool:
        """Wait until a call is recovered, if that is under way; return whether it was.

        Raises:
            RecoveryError, or whatever the call raised. As without look-ahead, nothing that the call computes with may have
                changed before backward asks for it: during a recovery, an optimizer may have changed it halfway.
        """
        started = self._started
        if started is None or started.handle() is not handle:
            return False
        try:
            started.wait()
        except Exception:
            self._remove(started)
            raise
        # After KeyboardInterrupt it may still run. The end of backward waits for it.
        is_first = self._remove(started)
        handle.call.conditions.require_unchanged()
        return is_first

    def forget(self) -> None:
        """Wait for a recovery that is under way, and free its results: backward recovers another call itself, or ends."""
        started = self._started
        if started is None:
            return
        with suppress(Exception):  # of a call that nobody asked for
            started.wait()
        if self._remove(started) and (handle := started.handle()) is not None:
            handle.call.free_refilled()

    def _remove(self, started: "_Started") -> bool:
        """Note that a recovery is not under way any more; return False if another thread has noted it before."""
        with self._lock:
            is_first = self._started is started
            if is_first:
                self._started = None
        return is_first

    def _call_after_backward(self) -> None:
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task = task
            cast(Any, torch.autograd.Variable)._execution_engine.queue_callback(_EndOfBackward(self))


@exclude_from_compilation
def _make_lookahead() -> Lookahead:
    return Lookahead()


class _EndOfBackward:
    """What PyTorch calls at the end of a backward. One that has raised only lets go of it."""

    def __init__(self, lookahead: Lookahead):
        self._lookahead: Lookahead | None = lookahead

    def __call__(self) -> None:
        lookahead, self._lookahead = self._lookahead, None
        if lookahead is not None:
            lookahead.forget()
            judge_deferred()

    def __del__(self) -> None:
        if self._lookahead is not None:
            with suppress(BaseException):  # no recovery runs on while the user, who has got another error, does something else
                self._lookahead.forget()
            self._lookahead._started = None


class _Started:
    """A recovery under way.

    Args:
        handle: what is recovered. Not kept alive: its graph does that as long as it may be asked for.
        wait: waits for the end, and raises what was raised; any number of threads may call it.
    """

    def __init__(self, handle: Handle, wait: Callable[[], object]):
        self.handle = ref(handle)
        self.wait = wait


_Executor = Callable[[Handle], _Started]  # begins a recovery


def _choose_executor(handle: Handle) -> _Executor | None:
    """Return what recovers a call ahead here, None for nothing."""
    if torch._C._current_graph_task_id() == -1 or runs_step():  # looked at outside of backward, or within another call
        return None
    device = handle.device
    if torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack() or device.type == "meta":
        return _recover_at_once
    if reason := _find_obstacle(handle):
        _warn_once(reason)
        return None
    return _recover_in_thread if device.type == "cpu" else _recover_on_side_stream


def _find_obstacle(handle: Handle) -> str | None:
    """Return why a call cannot be recovered while a gradient is computed, None if it can."""
    device = handle.device
    if device.type != "cpu" and not has_streams(device):
        return f"there is no side stream on {device.type}"
    if processes_communicate():
        if device.type == "cpu":
            return "several processes communicate, and a collective in another thread could come out of order"
        if is_sharded(*handle.call.conditions.fixed):
            return "parameters are sharded"
    if device.type == "cpu" and handle.call.forward.lookahead.follows_tracing:
        return "a step traces its own functions (map, associative_scan), which two threads cannot do at once"
    if device.type == "cpu" and not handle.needs_no_rewinding:
        return "a step draws random numbers, or some were drawn since its forward, and threads of a CPU share one stream"
    if _is_backward_compiled():
        return "backward is compiled (compiled autograd)"
    if not handle.call.forward.settings.are_in_force:
        return "settings of PyTorch that all threads share have changed since forward"
    if device.type != "cpu" and torch.is_autocast_enabled(device.type):
        return "backward runs under autocast, whose cache of weights belongs to one stream; call backward() outside of it"
    return None


@cache
def _warn_once(reason: str) -> None:
    warnings.warn(f"lookahead steps aside: {reason}. Gradients are the same, steps are recovered one by one.", stacklevel=2)


def _is_backward_compiled() -> bool:
    compiled_autograd = sys.modules.get("torch._dynamo.compiled_autograd")
    return compiled_autograd is not None and bool(compiled_autograd.in_compiled_autograd_region)


def _recover_at_once(handle: Handle) -> _Started:
    future = Future[None]()
    try:
        handle.recover_ahead()
        future.set_result(None)
    except Exception as error:
        future.set_exception(error)
    return _Started(handle, future.result)


# One thread: the recoveries of two backwards would wait for each other anyway.
_threads: list[ThreadPoolExecutor] = []
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_threads.clear)  # a forked process has no other threads


def _recover_in_thread(handle: Handle) -> _Started:
    if not _threads:
        _threads.append(ThreadPoolExecutor(1, "revzoo-lookahead"))
    # Context variables are those of backward, and so is the number of threads within an operation.
    try:
        future = _threads[0].submit(copy_context().run, _recover_with, torch.get_num_threads(), handle)
    except RuntimeError:  # the interpreter is shutting down (atexit), and no thread takes work any more
        return _recover_at_once(handle)
    return _Started(handle, future.result)


def _recover_with(num_threads: int, handle: Handle) -> None:
    if torch.get_num_threads() != num_threads:
        torch.set_num_threads(num_threads)
    leave_alone()
    handle.recover_ahead()


_side_streams: dict[torch.device, torch.Stream] = {}


def _recover_on_side_stream(handle: Handle) -> _Started:
    """Queue a recovery on the side stream of its device.

    The side stream first waits for all that is queued for gradients so far. Refilled tensors are in memory of the side stream.
    They are freed when the gradient that reads them has been queued, and the next recovery waits for that gradient; so it can
    safely use their memory again.
    """
    device = handle.device
    side = _side_streams.get(device) or _side_streams.setdefault(device, torch.Stream(device))
    side.wait_stream(torch.accelerator.current_stream(device))
    for tensor in handle.recoverer.get_sources(handle.call):  # they may be freed while the side stream still reads them
        tensor.record_stream(side)
    raised: list[Exception] = []
    with side:
        try:
            handle.recover_ahead()
        except Exception as error:
            raised.append(error)
        end = side.record_event()

    def wait() -> None:
        torch.accelerator.current_stream(device).wait_event(end)
        if raised:
            raise raised[0]

    return _Started(handle, wait)
