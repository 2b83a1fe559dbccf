"""Several threads: their forwards and backwards share torch's random streams, a graph, or buffers, and stay right."""

import os
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from revzoo.errors import RecoveryError
from revzoo.runtime import ReversibleChain, conditions, forward

DROPPING = ["invert", "selective", ["invert", "recompute", "invert", "invert"]]


def run_in_threads(*functions: Callable[[], object]) -> None:
    """Run functions at the same time; raise what one of them raises."""
    with ThreadPoolExecutor(len(functions)) as executor:
        for future in [executor.submit(function) for function in functions]:
            future.result()


class Slow(nn.Module):
    """Draw a mask, and let other threads run before and after it."""

    def __init__(self, draws: bool = True):
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)
        self.draws = draws
        self.note = list[Tensor]().append  # a list of its own would be as it was after a second run

    def forward(self, w: Tensor) -> Tensor:
        time.sleep(random.random() / 2000)
        mask = torch.rand_like(w) if self.draws else torch.ones_like(w)
        self.note(mask.detach())
        time.sleep(random.random() / 2000)
        return self.norm(self.linear(w) * mask).tanh()


@pytest.mark.parametrize("schedule", DROPPING, ids=str)
@pytest.mark.parametrize("lookahead", [0, 1])
def test_two_models_in_two_threads(schedule, lookahead):
    """What a thread draws depends on the other one, so each second run is compared with its first run."""
    chains = [ReversibleChain([Slow(draws=not lookahead) for _ in range(4)], lookahead=lookahead) for _ in range(2)]
    x1, x2 = torch.randn(2, 5, 6).unbind()

    def train(chain: ReversibleChain) -> None:
        chain.schedule = schedule
        for _ in range(5):
            y1, y2 = chain(x1, x2)
            (y1 * y2).sum().backward()

    run_in_threads(*(lambda chain=chain: train(chain) for chain in chains))
    for chain in chains:
        for step in chain.steps:
            masks = step.note.__self__
            assert len(masks) == 10
            assert all(torch.equal(a, b) for a, b in zip(masks[::2], masks[1::2], strict=True))
            assert step.norm.num_batches_tracked == 5


@pytest.mark.parametrize("schedule", DROPPING, ids=str)
@pytest.mark.parametrize("lookahead", [0, 1])
def test_two_threads_differentiate_one_graph(schedule, lookahead):
    chain = ReversibleChain([Slow(draws=not lookahead) for _ in range(4)], lookahead=lookahead).double()
    chain.schedule = schedule
    x1, x2 = torch.randn(2, 5, 6).double().unbind()
    y1, y2 = chain(x1, x2)
    loss, wanted = (y1 * y2).sum(), list(chain.parameters())
    buffers = [(buffer, buffer.clone()) for buffer in chain.buffers()]
    expected = torch.autograd.grad(loss, wanted, retain_graph=True)
    gradients: list[tuple[Tensor, ...]] = []

    def differentiate() -> None:
        for _ in range(5):
            gradients.append(torch.autograd.grad(loss, wanted, retain_graph=True))

    run_in_threads(differentiate, differentiate)
    assert len(gradients) == 10
    for each in gradients:
        torch.testing.assert_close(each, expected, rtol=1e-9, atol=1e-9)
    assert all(now is then for now, (then, _) in zip(chain.buffers(), buffers, strict=True))
    assert all(torch.equal(then, value) for then, value in buffers)


def test_a_thread_that_waits_in_vain_is_told_so(monkeypatch):
    """Here one thread runs a step that waits for a step of the other."""
    monkeypatch.setattr(forward, "_LONGEST_WAIT_SECONDS", 0.05)
    entered, done = threading.Event(), threading.Event()

    class Waiting(nn.Module):
        def forward(self, w: Tensor) -> Tensor:
            entered.set()
            done.wait(10)
            return w.tanh()

    def second() -> None:
        entered.wait(10)
        try:
            with pytest.raises(
                RecoveryError, match=r"A step has waited 0\.05 seconds for a step that another thread runs on cpu"
            ):
                ReversibleChain([nn.Tanh()])(*torch.ones(2, 3, requires_grad=True).unbind())
        finally:
            done.set()

    run_in_threads(lambda: ReversibleChain([Waiting()])(*torch.ones(2, 3, requires_grad=True).unbind()), second)


def test_where_processes_communicate_threads_do_not_wait_for_each_other(monkeypatch):
    """A collective inside a step waits for another thread's step, as where threads stand for ranks."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    meeting = threading.Barrier(2, timeout=10)

    class Meeting(nn.Module):
        def forward(self, w: Tensor) -> Tensor:
            meeting.wait()
            return w.tanh()

    def train() -> None:
        y1, y2 = ReversibleChain([Meeting(), Meeting()])(*torch.ones(2, 3, requires_grad=True).unbind())
        (y1 * y2).sum().backward()

    run_in_threads(train, train)


def test_selective_steps_that_overlap_leave_no_note_of_a_dispatch_mode(monkeypatch):
    """PyTorch keeps it for all threads together: with one the compiler of 2.10 captures nothing."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)  # so that threads do not wait for each other
    first_in, second_in, first_out = threading.Event(), threading.Event(), threading.Event()

    class Waiting(nn.Module):
        def __init__(self, entered: threading.Event, awaited: threading.Event):
            super().__init__()
            self.entered, self.awaited = entered, awaited

        def forward(self, w: Tensor) -> Tensor:
            self.entered.set()
            assert self.awaited.wait(10)
            return w.tanh()

    def run(*events: threading.Event) -> None:
        chain = ReversibleChain([Waiting(*events)])
        chain.schedule = "selective"
        chain(*torch.ones(2, 3, requires_grad=True).unbind())

    def run_first() -> None:
        run(first_in, second_in)
        first_out.set()

    def run_second() -> None:
        assert first_in.wait(10)
        run(second_in, first_out)

    run_in_threads(run_first, run_second)
    assert not is_in_torch_dispatch_mode()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_process_forked_while_another_thread_runs_a_step_need_not_wait_for_it():
    held = forward.take_turn(torch.device("cpu"))

    def fork() -> None:
        pid = os.fork()
        if pid == 0:
            free = forward._turns.get(torch.device("cpu"), threading.RLock()).acquire(blocking=False)
            os._exit(0 if free else 1)
        assert os.waitpid(pid, 0)[1] == 0

    run_in_threads(fork)
    held.release()


def test_a_random_stream_that_cannot_be_read_leaves_no_thread_waiting(monkeypatch):
    """As inside the capture of a CUDA graph."""
    y1, y2 = ReversibleChain([nn.Tanh()])(*torch.ones(2, 3, requires_grad=True).unbind())

    def fail(_: object) -> None:
        raise RuntimeError("no state")

    with monkeypatch.context() as patch:
        patch.setattr(conditions.RandomState, "rewind", fail)
        with pytest.raises(RuntimeError, match="no state"):
            (y1 * y2).sum().backward()

    def take() -> None:
        assert forward._turns[torch.device("cpu")].acquire(blocking=False)
        forward._turns[torch.device("cpu")].release()

    run_in_threads(take)
