"""Look-ahead and what goes on around it: other threads, errors and interrupts, nested backwards, other features of PyTorch."""

import os
import signal
import sys
import threading
import time
import warnings
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from revzoo.errors import RecoveryError
from revzoo.runtime import ReversibleChain, lookahead
from tests.runtime.test_lookahead import MODES, Linear, Told, assert_same_with_and_without, backward, told


def test_an_error_of_a_step_that_nobody_asks_for_is_forgotten_too():
    def fail(k: int) -> None:
        if k == 3:
            raise ValueError("nobody has asked")

    chain = told(6, fail)
    y = chain(*torch.randn(2, 3, 6))
    torch.autograd.grad((y[0] * y[1]).sum(), [p for step in chain.steps[3:] for p in step.parameters()])


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_what_is_raised_in_the_other_thread_is_raised_by_backward(error):
    """After that, the same graph can be differentiated."""
    errors = [error("stop here")]

    def fail(k: int) -> None:
        if k == 2 and errors:
            assert threading.current_thread() is not threading.main_thread()
            raise errors.pop()

    chain = told(4, fail)
    y = chain(*torch.randn(2, 3, 6))
    loss, wanted = (y[0] * y[1]).sum(), list(chain.parameters())
    with pytest.raises(error, match="stop here"):
        torch.autograd.grad(loss, wanted, retain_graph=True)
    again, ahead = (torch.autograd.grad(loss, wanted, retain_graph=True) for _ in range(2))
    torch.testing.assert_close(again, ahead)


def test_backward_ends_with_nothing_under_way():
    """A recovery that nobody takes still runs when the last gradient is complete."""
    ended = []

    def on_recovery(k: int) -> None:
        if k == 1:
            time.sleep(0.1)
            ended.append(k)

    chain = told(4, on_recovery)
    y = chain(*torch.randn(2, 3, 6))
    torch.autograd.grad((y[0] * y[1]).sum(), [p for step in chain.steps[1:] for p in step.parameters()])
    assert ended == [1]


def test_a_step_that_differentiates_inside_itself_does_not_wait_for_itself():
    """Its inner chain cannot look ahead: the outer step holds what the other thread would need."""

    class Energy(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = ReversibleChain([Linear(6) for _ in range(4)])
            self.inner.lookahead = 1

        def forward(self, w: Tensor) -> Tensor:
            with torch.enable_grad():
                v = w.detach().requires_grad_()
                y1, y2 = self.inner(v, v * 2)
                (force,) = torch.autograd.grad(y1.sum() + y2.sum(), v)
            return w * force

    chain = ReversibleChain([Energy() for _ in range(3)])
    done = threading.Event()

    def run() -> None:
        assert_same_with_and_without(chain, *torch.randn(2, 3, 6))
        done.set()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(30)
    assert done.is_set()


def test_a_hook_that_draws_during_a_recovery_draws_its_own_numbers():
    """The recovery waits for the hook and the hook for the recovery, so they are at work at the same time."""
    recovering, has_drawn, drawn = threading.Event(), threading.Event(), []

    def on_recovery(k: int) -> None:
        if k == 2 and chain.lookahead:
            recovering.set()
            assert has_drawn.wait(20)

    def on_gradient(k: int) -> None:
        if k == 3:
            assert not chain.lookahead or recovering.wait(20)
            drawn.append(torch.rand(1))
            has_drawn.set()

    chain = told(4, on_recovery, on_gradient)
    for depth in (0, 1):
        chain.lookahead = depth
        torch.manual_seed(0)
        y = chain(*torch.randn(2, 3, 6).requires_grad_())
        # After the hook, the last step is recovered in turn.
        with pytest.warns(UserWarning, match="or some were drawn since its forward") if depth else nullcontext():
            (y[0] * y[1]).sum().backward()
        drawn.append(torch.rand(1))
    assert drawn[:2] == drawn[2:]


@pytest.mark.parametrize("modes", ["invert", "mixed"])
@pytest.mark.filterwarnings("ignore:lookahead steps aside. a step draws")
def test_checkpointing_with_dropout_inside_a_step(modes):
    """Its recomputation in backward sets the random state. Meanwhile another step must not draw."""

    class Checkpointing(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, w: Tensor) -> Tensor:
            masked = torch.dropout(self.first(w), 0.5, train=True)
            return masked + checkpoint(
                lambda v: torch.dropout(self.second(v).tanh(), 0.5, train=True).sin(), w, use_reentrant=False
            )

    chain = ReversibleChain([Checkpointing() for _ in range(7)])
    chain.schedule = MODES[modes]
    x = torch.randn(2, 3, 6)
    expected = backward(chain, *x)
    chain.lookahead = 1
    for _ in range(4):
        assert all(torch.equal(a, b) for a, b in zip(backward(chain, *x), expected, strict=True))


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_backward_that_raises_leaves_nothing_under_way(error):
    """A recovery that ran on would draw from the stream that the user has next, and exchange buffers."""
    recovering, ended = threading.Event(), []

    def on_recovery(k: int) -> None:
        if k == 2 and not ended:
            recovering.set()
            time.sleep(0.05)
            ended.append(k)

    def on_gradient(k: int) -> None:
        if k == 3 and not ended:
            assert recovering.wait(20)
            raise error("stop")

    chain = told(4, on_recovery, on_gradient)
    x = torch.randn(2, 3, 6)
    y = chain(*x)
    state = torch.get_rng_state()
    with pytest.raises(error, match="stop"):
        (y[0] * y[1]).sum().backward()
    assert ended == [2]
    assert torch.equal(torch.get_rng_state(), state)
    assert_same_with_and_without(chain, *x)


def test_a_backward_that_is_interrupted_leaves_nothing_under_way():
    ended = []

    def on_recovery(k: int) -> None:
        if k == 3:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            time.sleep(0.05)
            ended.append(k)

    y = told(4, on_recovery)(*torch.randn(2, 3, 6).requires_grad_())
    state = torch.get_rng_state()
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            (y[0] * y[1]).sum().backward()
    finally:
        signal.signal(signal.SIGINT, handler)
    assert ended == [3]
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("mode", ["invert", "recompute"])
@pytest.mark.parametrize("depth", [0, 1])
def test_an_optimizer_that_steps_during_a_recovery_is_refused(mode, depth):
    """A parameter that a step ends by adding has its gradient before the step has run again, or while it does."""
    recovering, stepped = threading.Event(), threading.Event()

    class Biased(Told):
        def __init__(self, *args: Any):
            super().__init__(*args)
            self.bias = nn.Parameter(torch.zeros(6))

        def forward(self, w: Tensor) -> Tensor:
            return super().forward(w) + self.bias

    def on_recovery(k: int) -> None:
        if k == 3 and depth:
            recovering.set()
            assert stepped.wait(20)

    def on_gradient(k: int) -> None:
        if k == 4 and depth:
            assert recovering.wait(20)

    def step(bias: nn.Parameter) -> None:
        with torch.no_grad():
            bias.add_(bias.grad, alpha=-1e-6)
        stepped.set()

    chain = ReversibleChain([Biased(i + 1, on_recovery, on_gradient) for i in range(4)])
    chain.schedule, chain.lookahead = mode, depth
    chain.steps[2].bias.register_post_accumulate_grad_hook(step)
    y = chain(*torch.randn(2, 3, 6).requires_grad_())
    with pytest.raises(RecoveryError, match=r"'bias' of steps\.2 was changed in place between forward and backward"):
        (y[0] * y[1]).sum().backward()


def test_without_threads_steps_are_recovered_ahead_at_once(monkeypatch):
    """While the interpreter shuts down, in a function of atexit, no thread takes work."""
    executor = lookahead.ThreadPoolExecutor(1)
    executor.shutdown()
    monkeypatch.setattr(lookahead, "_threads", [executor])
    assert_same_with_and_without(told(4), *torch.randn(2, 3, 6))


@pytest.mark.parametrize("end", ["finish", "forget"])
def test_a_thread_that_has_waited_longer_forgets_no_later_recovery(end, monkeypatch):
    """While one thread waits, another one goes on to the next recovery, which may still be under way."""
    ahead, first, second = lookahead.Lookahead(), MagicMock(), MagicMock()
    goes_on = iter([True, False])

    def wait() -> None:
        if next(goes_on, False):  # what another thread does meanwhile
            assert ahead.finish(first)
            ahead.start(second)

    monkeypatch.setattr(lookahead, "_choose_executor", lambda _: lambda each: lookahead._Started(each, wait))
    monkeypatch.setattr(lookahead.Lookahead, "_call_after_backward", lambda _: None)
    ahead.start(first)
    if end == "finish":
        assert not ahead.finish(first)
    else:
        ahead.forget()
    first.call.free_refilled.assert_not_called()  # the other thread takes what it needs
    assert ahead.finish(second)


def test_a_forked_process_has_a_thread_of_its_own():
    chain = told(3)
    backward(chain, *torch.randn(2, 3, 6))
    assert lookahead._threads
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:  # backward itself does not work there if the parent's has run on several devices
        threading.Timer(20, os._exit, (1,)).start()
        recoverable = MagicMock()
        lookahead._recover_in_thread(recoverable).wait()
        os._exit(0 if recoverable.recover_ahead.called else 2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_autocast_and_threads_within_operations_are_those_of_backward():
    seen: list[tuple[bool, int]] = []

    def note(_: int) -> None:
        seen.append((torch.is_autocast_enabled("cpu"), torch.get_num_threads()))

    chain = told(4, note)
    chain.lookahead = 1
    threads = torch.get_num_threads()
    with torch.autocast("cpu", torch.bfloat16):
        y = chain(*torch.randn(2, 3, 6))
    (y[0] * y[1]).sum().backward()
    assert seen == [(True, threads)] * 4


class Traces(nn.Module):
    """Runs its function on tensors without values first, as `torch._higher_order_ops.map` does, by globals of PyTorch."""

    def forward(self, x: Tensor) -> Tensor:
        with FakeTensorMode():
            torch.ones(1, requires_grad=True).sin()
        return x.sin()


REASONS = {
    "tracing": "a step traces its own functions",
    "dropout": "a step draws random numbers",
    "draws": "or some were drawn since its forward",
    "processes": "several processes communicate",
    "setting": "settings of PyTorch that all threads share have changed",
    "compiled autograd": "backward is compiled",
    "device": "no side stream on mps",
}


@pytest.mark.parametrize("around", REASONS)
def test_it_steps_aside_and_says_so(around, monkeypatch):
    recovered_in: list[threading.Thread] = []
    chain = told(4, lambda _: recovered_in.append(threading.current_thread()))
    if around == "dropout":
        chain.steps[3].body.append(nn.Dropout(0.1))
    if around == "tracing":
        chain.steps[1].body.append(Traces())
    y = chain(*torch.randn(2, 3, 6))
    match around:
        case "draws":
            torch.rand(1)
        case "processes":
            monkeypatch.setattr(lookahead, "processes_communicate", lambda: True)
        case "setting":
            torch.use_deterministic_algorithms(True)
        case "compiled autograd":
            compiler = SimpleNamespace(in_compiled_autograd_region=True)
            monkeypatch.setitem(sys.modules, "torch._dynamo.compiled_autograd", compiler)
        case "device":
            monkeypatch.setattr("revzoo.runtime.refill_hooks.Handle.device", torch.device("mps"))
    try:
        with pytest.warns(UserWarning, match=f"lookahead steps aside: .*{REASONS[around]}") as found:
            (y[0] * y[1]).sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(found) == 1
    assert set(recovered_in) == {threading.main_thread()}
