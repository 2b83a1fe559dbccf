"""Look-ahead: the order of recoveries and gradients, the same bits as without it, its memory, and what ends or prevents it."""

import copy
import json
import os
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import revzoo
from revzoo.errors import InputError, RecoveryError
from revzoo.registry import couplings
from revzoo.runtime import LiveBytes, ReversibleChain, SpaceToDepth, lookahead, lookahead_setting, replay, settings

MODES = {
    "invert": ["invert"],
    "recompute": ["recompute"],
    "selective": ["selective"],
    "mixed": ["invert", "recompute", "selective", "invert", "store", "invert", "invert"],
}
Events = list[tuple[str, int]]


@pytest.fixture(autouse=True)
def _forget_warnings() -> Iterator[None]:
    yield
    lookahead._warn_once.cache_clear()


class Mark(torch.autograd.Function):
    """The identity; its backward first asks for what it saved, and then calls a function."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Callable[[], None]) -> Tensor:
        ctx.save_for_backward(x)
        ctx.call = call
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        assert ctx.saved_tensors
        ctx.call()
        return grads[0], None


class Told(nn.Module):
    """A step that tells when it is recovered and differentiated."""

    def __init__(self, number: int, on_recovery: Callable[[int], None], on_gradient: Callable[[int], None], p: float = 0.0):
        super().__init__()
        dropout = [nn.Dropout(p)] if p else []
        self.body = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 12), nn.GELU(), *dropout, nn.Linear(12, 6))
        self.number = number
        self.on_recovery, self.on_gradient = on_recovery, on_gradient
        self.calls = 0

    def forward(self, w: Tensor) -> Tensor:
        self.calls += 1
        if self.calls % 2 == 0:
            self.on_recovery(self.number)
        return Mark.apply(self.body(w), partial(self.on_gradient, self.number))


def told(count: int, on_recovery: Callable[[int], None], on_gradient: Callable[[int], None], modes: list[str] | None = None):
    chain = ReversibleChain([Told(i + 1, on_recovery, on_gradient) for i in range(count)])
    chain.schedule = modes or ["invert"] * count
    chain.lookahead = 1
    return chain


def backward(chain: nn.Module, *inputs: Tensor, seed: int = 3) -> list[Tensor]:
    """Return gradients of inputs and parameters, buffers, and a random number drawn after it all."""
    torch.manual_seed(seed)
    inputs = tuple(x.detach().clone().requires_grad_() for x in inputs)
    chain.zero_grad()
    out = chain(*inputs)
    outs = out if isinstance(out, tuple) else (out,)
    sum((y.sin() * torch.linspace(0, 1, y.numel()).view_as(y)).sum() for y in outs).backward()
    grads = [x.grad for x in (*inputs, *chain.parameters()) if x.grad is not None]
    return [*grads, *(b.clone() for b in chain.buffers()), torch.rand(1)]


def assert_same_with_and_without(chain: nn.Module, *inputs: Tensor, repeats: int = 2) -> None:
    chain.lookahead = 0
    state = copy.deepcopy(chain.state_dict())
    expected = backward(chain, *inputs)
    assert len(expected) > 1
    chain.lookahead = 1
    for _ in range(repeats):
        chain.load_state_dict(state)
        actual = backward(chain, *inputs)
        assert len(actual) == len(expected)
        assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


class Unseen(TorchDispatchMode):
    """A mode that changes nothing; recovery then runs in the thread of backward, so the order of events is one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


ORDER = {
    1: "r1 g1",
    2: "r2 r1 g2 g1",
    3: "r3 r2 g3 r1 g2 g1",
    4: "r4 r3 g4 r2 g3 r1 g2 g1",
    5: "r5 r4 g5 r3 g4 r2 g3 r1 g2 g1",
    6: "r6 r5 g6 r4 g5 r3 g4 r2 g3 r1 g2 g1",
    7: "r7 r6 g7 r5 g6 r4 g5 r3 g4 r2 g3 r1 g2 g1",
    8: "r8 r7 g8 r6 g7 r5 g6 r4 g5 r3 g4 r2 g3 r1 g2 g1",
}


@pytest.mark.parametrize("modes", ["invert", "recompute", "selective"])
@pytest.mark.parametrize("count", ORDER)
def test_the_order_of_recoveries_and_gradients(count, modes):
    events: list[str] = []
    chain = told(count, lambda k: events.append(f"r{k}"), lambda k: events.append(f"g{k}"), [modes] * count)
    with Unseen():
        backward(chain, *torch.randn(2, 3, 6))
    assert " ".join(events) == ORDER[count]


@pytest.mark.parametrize("count", ORDER)
def test_the_order_without_lookahead(count):
    events: list[str] = []
    chain = told(count, lambda k: events.append(f"r{k}"), lambda k: events.append(f"g{k}"))
    chain.lookahead = 0
    backward(chain, *torch.randn(2, 3, 6))
    assert events == [f"{event}{k}" for k in range(count, 0, -1) for event in "rg"]


def test_stored_steps_are_passed_over():
    events: list[str] = []
    modes = ["invert", "store", "recompute", "store", "store", "invert"]
    chain = told(6, lambda k: events.append(f"r{k}"), lambda k: events.append(f"g{k}"), modes)
    for i in (1, 3, 4):
        chain.steps[i].on_recovery = lambda k: pytest.fail("a stored step ran again")
    with Unseen():
        backward(chain, *torch.randn(2, 3, 6))
    assert " ".join(events) == "r6 r3 g6 g5 g4 r1 g3 g2 g1"


@pytest.mark.parametrize("count", [2, 3, 6, 7])
def test_a_recovery_runs_beside_the_gradient_of_the_step_after_it(count):
    """Each recovery but the first waits for that gradient to begin, and that gradient for the recovery: they must overlap."""
    recovering = {k: threading.Event() for k in range(count + 1)}
    differentiating = {k: threading.Event() for k in range(count + 2)}
    seconds = 20

    def on_recovery(k: int) -> None:
        recovering[k].set()
        assert k == count or differentiating[k + 1].wait(seconds), f"gradient {k + 1} did not begin beside recovery {k}"

    def on_gradient(k: int) -> None:
        differentiating[k].set()
        assert k == 1 or recovering[k - 1].wait(seconds), f"recovery {k - 1} did not begin beside gradient {k}"

    backward(told(count, on_recovery, on_gradient), *torch.randn(2, 3, 6))


# Where the two threads meet: in the second run, in the gradient, and where one of them begins, ends or waits.
DELAYS = ("nowhere", "recovery", "gradient", "start", "finish", "forget", "turn", "settings", "free")


@pytest.mark.parametrize("delay", DELAYS)
@pytest.mark.parametrize("modes", MODES)
def test_delays_change_no_bit(modes, delay, monkeypatch):
    """Either thread is held up wherever they meet; BatchNorm's statistics and kept bits would show a race."""

    def slow(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            time.sleep(0.003)
            out = function(*args, **kwargs)
            time.sleep(0.003)
            return out

        return call

    hold = {delay: lambda _: time.sleep(0.005)}
    where = {
        "start": (lookahead.Lookahead, "start"),
        "finish": (lookahead.Lookahead, "finish"),
        "forget": (lookahead.Lookahead, "forget"),
        "turn": (replay, "_take_turn"),
        "settings": (settings.Settings, "run"),
        "free": (lookahead.Lookahead, "_drop_started"),
    }
    count = 7
    chain = told(count, hold.get("recovery", lambda _: None), hold.get("gradient", lambda _: None))
    for step in chain.steps:
        step.body.insert(2, nn.BatchNorm1d(12))
    chain.couplings = (couplings["momentum"](kept_bits=3),) * count
    chain.schedule = (MODES[modes] * count)[:count]
    if delay in where:
        owner, name = where[delay]
        monkeypatch.setattr(owner, name, slow(getattr(owner, name)))
    assert_same_with_and_without(chain, *torch.randn(2, 5, 6), repeats=1)


@pytest.mark.parametrize("count", range(1, 9))
@pytest.mark.parametrize("modes", MODES)
@pytest.mark.parametrize("coupling", ["additive", "leapfrog", "kept"])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.filterwarnings("ignore:lookahead steps aside. a step draws")
def test_bits_are_those_of_the_serial_backward(count, modes, coupling, dropout):
    steps = [Told(i, lambda _: None, lambda _: None, dropout) for i in range(count)]
    chosen = couplings["momentum"](kept_bits=4) if coupling == "kept" else coupling
    chain = ReversibleChain(steps, chosen, exact=coupling == "kept")
    chain.schedule = (MODES[modes] * count)[:count]
    assert_same_with_and_without(chain, *torch.randn(2, 4, 6))


def test_bijections_convolutions_and_batch_norm():
    def conv(width: int) -> nn.Module:
        return nn.Sequential(nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1))

    chain = ReversibleChain([conv(2), conv(2), SpaceToDepth(2), conv(8), conv(8), conv(8)])
    assert_same_with_and_without(chain, *torch.randn(2, 3, 2, 4, 4), repeats=4)


@pytest.mark.parametrize(
    "name", ["rev_vit_digits", "irevnet_digits", "rev_swin_digits", "rev_mvit_digits", "reformer_mini", "revnet_digits"]
)
@pytest.mark.parametrize("recompute_nodes", [False, True])
@pytest.mark.filterwarnings("ignore:lookahead steps aside. a step draws")
def test_models_with_several_chains_and_nodes(name, recompute_nodes):
    """Nodes between chains are looked ahead to as well."""
    model = revzoo.create(name)
    kinds = [entry.kind for entry in model.layout() if entry.is_unit]
    model.schedule = ["recompute" if kind == "node" else "invert" for kind in kinds] if recompute_nodes else "invert"
    batch = model.example_input(2)
    losses = []
    for depth in (0, 1, 1):
        model.lookahead = depth
        torch.manual_seed(0)
        model.zero_grad()
        state = copy.deepcopy(model.state_dict())
        model(batch).square().sum().backward()
        model.load_state_dict(state)
        losses.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert len(losses[0]) > 10
    for other in losses[1:]:
        assert all(torch.equal(a, b) for a, b in zip(losses[0], other, strict=True))


def test_a_node_between_chains_is_recovered_ahead():
    """The head is asked for first, the last step is the next one."""
    model = revzoo.create("rev_vit_digits")
    model.schedule = ["recompute" if entry.kind == "node" else "invert" for entry in model.layout() if entry.is_unit]
    model.lookahead = 1
    order: list[str] = []
    seen: set[str] = set()

    def note(name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            if name in seen:
                order.append(name)
            seen.add(name)

        return hook

    units = [entry for entry in model.layout() if entry.is_unit]
    for entry in units:
        entry.module.register_forward_pre_hook(note(entry.name))
    model(model.example_input(2)).sum().backward()
    assert order == [entry.name for entry in reversed(units) if entry.name in order]
    assert {"stem", "fuse"} <= set(order)
    assert len(order) >= len(model.steps) + 2


def test_a_retained_graph():
    chain = told(5, lambda _: None, lambda _: None).double()
    x = [t.requires_grad_() for t in torch.randn(2, 3, 6).double()]
    y = chain(*x)
    loss, wanted = (y[0] * y[1]).sum(), list(chain.parameters())
    chain.lookahead = 0
    first, *others = (torch.autograd.grad(loss, wanted, retain_graph=True) for _ in range(4))
    for other in others:
        for a, b in zip(first, other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("modes", ["invert", "recompute"])
def test_what_backward_does_not_ask_for_is_forgotten(modes):
    """Only the gradients of the last three steps are wanted, so the recovery of the third step is for nobody."""
    recovered: list[int] = []
    chain = told(6, recovered.append, lambda _: None, [modes] * 6)
    x = torch.randn(2, 3, 6)
    torch.manual_seed(0)
    y = chain(*x)
    wanted = [p for step in chain.steps[3:] for p in step.parameters()]
    grads = torch.autograd.grad((y[0] * y[1]).sum(), wanted)
    assert recovered == [6, 5, 4, 3]
    for step in chain.steps:
        step.calls = 0
    chain.lookahead = 0
    torch.manual_seed(0)
    y = chain(*x)
    expected = torch.autograd.grad((y[0] * y[1]).sum(), wanted)
    assert all(torch.equal(a, b) for a, b in zip(grads, expected, strict=True))


def test_an_output_that_never_reaches_the_loss():
    chain = told(5, lambda _: None, lambda _: None)
    for used in (0, 1):
        results = []
        for depth in (0, 1):
            chain.lookahead = depth
            torch.manual_seed(0)
            chain.zero_grad()
            chain(*torch.randn(2, 3, 6).requires_grad_())[used].square().sum().backward()
            results.append([p.grad for p in chain.parameters() if p.grad is not None])
        assert results[0]
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_an_error_of_a_step_that_nobody_asks_for_is_forgotten_too():
    def fail(k: int) -> None:
        if k == 3:
            raise ValueError("nobody has asked")

    chain = told(6, fail, lambda _: None)
    y = chain(*torch.randn(2, 3, 6))
    torch.autograd.grad((y[0] * y[1]).sum(), [p for step in chain.steps[3:] for p in step.parameters()])


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_what_is_raised_in_the_other_thread_is_raised_by_backward(error):
    fails = True

    def fail(k: int) -> None:
        if k == 2 and fails:
            assert threading.current_thread() is not threading.main_thread()
            raise error("stop here")

    chain = told(4, fail, lambda _: None)
    with pytest.raises(error, match="stop here"):
        backward(chain, *torch.randn(2, 3, 6))
    fails = False
    for step in chain.steps:
        step.calls = 0
    assert_same_with_and_without(chain, *torch.randn(2, 3, 6))


def test_a_retained_graph_goes_on_after_an_interrupt_in_the_other_thread():
    interrupts = [KeyboardInterrupt]

    def fail(k: int) -> None:
        if k == 2 and interrupts:
            raise interrupts.pop()

    chain = told(4, fail, lambda _: None)
    y = chain(*torch.randn(2, 3, 6))
    loss, wanted = (y[0] * y[1]).sum(), list(chain.parameters())
    with pytest.raises(KeyboardInterrupt):
        torch.autograd.grad(loss, wanted, retain_graph=True)
    again, ahead = (torch.autograd.grad(loss, wanted, retain_graph=True) for _ in range(2))
    for a, b in zip(again, ahead, strict=True):
        torch.testing.assert_close(a, b)


def test_the_tripwire_names_a_step_recovered_ahead():
    count = [0]

    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, w: Tensor) -> Tensor:
            count[0] += 1
            return self.linear(w).tanh() * (1 + count[0] // 5)

    chain = ReversibleChain([Counting() for _ in range(4)])
    chain.lookahead = 1
    with pytest.raises(RecoveryError, match=r"steps\.\d ran differently the second time"):
        backward(chain, *torch.randn(2, 3, 6))


def test_backward_has_ended_before_anything_else_draws():
    """A recovery that nobody takes still runs when the last gradient is complete; random streams must be back in place."""
    chain = told(4, lambda k: time.sleep(0.02 if k == 1 else 0), lambda _: None)
    x = torch.randn(2, 3, 6)
    numbers = []
    for depth in (0, 1):
        chain.lookahead = depth
        torch.manual_seed(0)
        y = chain(*x)
        torch.autograd.grad((y[0] * y[1]).sum(), [p for step in chain.steps[1:] for p in step.parameters()])
        numbers.append(torch.rand(3))
        for step in chain.steps:
            step.calls = 0
    assert torch.equal(*numbers)


class Linear(nn.Module):
    """A step that saves its input, its hidden state and nothing else."""

    def __init__(self, hidden: int):
        super().__init__()
        self.first, self.second = nn.Linear(6, hidden, bias=False), nn.Linear(hidden, 6, bias=False)

    def forward(self, w: Tensor) -> Tensor:
        return self.second(self.first(w).sigmoid())


@pytest.mark.parametrize("mode", ["invert", "recompute"])
def test_memory_is_that_of_one_more_step(mode):
    """Beside the gradient of one step, the tensors that the next one refills, and the state that its inversion rebuilds."""
    batch, hidden = 64, 60
    chain = ReversibleChain([Linear(hidden) for _ in range(6)])
    chain.schedule = mode
    peaks = []
    for depth in (0, 1):
        chain.lookahead = depth
        x = [torch.randn(batch, 6, requires_grad=True) for _ in range(2)]
        weights = [torch.randn(batch, 6) for _ in range(2)]
        with LiveBytes() as live:
            known = live.watch([*chain.parameters(), *x, *weights])
            y = chain(*x)
            torch.autograd.backward(y, weights)
            known |= live.watch([p.grad for p in chain.parameters()])
        peaks.append(live.peak(without=known))
        chain.zero_grad()
    state, refilled = 4 * batch * 6, 4 * batch * hidden
    assert peaks[1] - peaks[0] == refilled + (state if mode == "invert" else 0)


def test_everything_is_freed_with_the_graph():
    chain = told(5, lambda _: None, lambda _: None)
    with LiveBytes() as live:
        known = live.watch([*chain.parameters()])
        y = chain(*torch.randn(2, 3, 6))
        loss = (y[0] * y[1]).sum()
        del y
        loss.backward()
        known |= live.watch([p.grad for p in chain.parameters()])
        del loss
        assert live.alive(without=known) == 0


@pytest.mark.parametrize("has_backward", [True, False])
def test_nothing_keeps_the_graph(has_backward):
    held: list[weakref.ref[Any]] = []

    class Holding(nn.Module):
        def forward(self, w: Tensor) -> Tensor:
            token = partial(int)
            held.append(weakref.ref(token))
            return Mark.apply(w.tanh(), token)

    chain = ReversibleChain([Holding() for _ in range(4)])
    chain.lookahead = 1
    y = chain(*torch.randn(2, 3, 6).requires_grad_())
    loss = (y[0] * y[1]).sum()
    if has_backward:
        loss.backward(retain_graph=True)
    assert all(ref() is not None for ref in held[:4])
    del y, loss
    assert [ref() for ref in held] == [None] * (8 if has_backward else 4)


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


def test_a_hook_that_draws_beside_a_recovery_draws_its_own_numbers():
    """The recovery waits for the hook and the hook for the recovery, so they are at work at the same time."""
    drawn: dict[int, list[Tensor]] = {0: [], 1: []}
    for depth in (0, 1):
        recovering, has_drawn = threading.Event(), threading.Event()

        def on_recovery(k: int, depth=depth, recovering=recovering, has_drawn=has_drawn) -> None:
            if k == 2 and depth:
                recovering.set()
                assert has_drawn.wait(20)

        def on_gradient(k: int, depth=depth, recovering=recovering, has_drawn=has_drawn) -> None:
            if k == 3:
                assert not depth or recovering.wait(20)
                drawn[depth].append(torch.rand(1))
                has_drawn.set()

        torch.manual_seed(0)
        chain = told(4, on_recovery, on_gradient)
        chain.lookahead = depth
        y = chain(*torch.randn(2, 3, 6).requires_grad_())
        if depth:
            with pytest.warns(UserWarning, match="or some were drawn since its forward"):
                (y[0] * y[1]).sum().backward()  # after the hook, the last step is recovered in turn
        else:
            (y[0] * y[1]).sum().backward()
        drawn[depth].append(torch.rand(1))
    assert len(drawn[1]) == 2
    assert all(torch.equal(a, b) for a, b in zip(drawn[0], drawn[1], strict=True))


@pytest.mark.parametrize("modes", MODES)
@pytest.mark.filterwarnings("ignore:lookahead steps aside. a step draws")
def test_checkpointing_with_dropout_inside_a_step(modes):
    """Its recomputation in backward sets the random state. Beside it, another step must not draw."""

    class Checkpointing(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, w: Tensor) -> Tensor:
            masked = torch.dropout(self.first(w), 0.5, train=True)
            return masked + checkpoint(
                lambda v: torch.dropout(self.second(v).tanh(), 0.5, train=True).sin(), w, use_reentrant=False
            )

    chain = ReversibleChain([Checkpointing() for _ in range(6)])
    chain.schedule = (MODES[modes] * 6)[:6]
    x = torch.randn(2, 3, 6)
    expected = backward(chain, *x)
    chain.lookahead = 1
    for _ in range(20):
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


def test_a_wait_that_is_interrupted_leaves_nothing_under_way(monkeypatch):
    ended = []

    class Interrupted:
        """A future; the first wait for it ends with Ctrl-C."""

        def __init__(self, future: Any):
            self.future, self.waits = future, 0

        def result(self) -> None:
            self.waits += 1
            if self.waits == 1:
                raise KeyboardInterrupt
            self.future.result()

    def on_recovery(k: int) -> None:
        if k == 3:
            time.sleep(0.05)
            ended.append(k)

    chain = told(4, on_recovery, lambda k: None)
    y = chain(*torch.randn(2, 3, 6).requires_grad_())
    state = torch.get_rng_state()
    with lookahead.ThreadPoolExecutor(1) as executor:
        proxy = SimpleNamespace(submit=lambda *args: Interrupted(executor.submit(*args)))
        monkeypatch.setattr(lookahead, "_threads", [proxy])
        with pytest.raises(KeyboardInterrupt):
            (y[0] * y[1]).sum().backward()
        assert ended == [3]
        assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("mode", ["invert", "recompute", "selective"])
@pytest.mark.parametrize("depth", [0, 1])
def test_an_optimizer_that_steps_beside_a_recovery_is_refused(mode, depth):
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
    chain.schedule, chain.lookahead = [mode] * 4, depth
    chain.steps[2].bias.register_post_accumulate_grad_hook(step)
    y = chain(*torch.randn(2, 3, 6).requires_grad_())
    with pytest.raises(RecoveryError, match=r"'bias' of steps\.2 was changed in place between forward and backward"):
        (y[0] * y[1]).sum().backward()


def test_without_threads_steps_are_recovered_ahead_at_once(monkeypatch):
    """While the interpreter shuts down, in a function of atexit, no thread takes work."""
    executor = lookahead.ThreadPoolExecutor(1)
    executor.shutdown()
    monkeypatch.setattr(lookahead, "_threads", [executor])
    assert_same_with_and_without(told(4, lambda k: None, lambda k: None), *torch.randn(2, 3, 6))


def test_only_one_recovery_is_under_way(monkeypatch):
    """Two threads that differentiate one graph may both want to start one."""
    started: list[Any] = []

    def execute(each: Any) -> Any:
        started.append(each)
        return lookahead._Started(each, lambda: None)

    monkeypatch.setattr(lookahead, "_choose_executor", lambda _: execute)
    monkeypatch.setattr(lookahead.Lookahead, "_call_after_backward", lambda _: None)
    ahead, first, second = lookahead.Lookahead(), MagicMock(), MagicMock()
    ahead.start(first)
    ahead.start(second)
    assert started == [first]
    assert not ahead.finish(second)
    assert ahead.finish(first)
    ahead.start(second)
    assert started == [first, second]
    ahead.forget()
    assert not ahead.finish(second)


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
    first.free_refilled.assert_not_called()  # the other thread takes what it needs
    assert ahead.finish(second)


def test_two_backwards_in_two_threads():
    chains = [told(5, lambda _: time.sleep(0.001), lambda _: time.sleep(0.001)) for _ in range(2)]
    x = torch.randn(2, 3, 6)

    def gradients(chain: ReversibleChain) -> list[Tensor]:
        y = chain(*x)
        return list(torch.autograd.grad((y[0] * y[1]).sum(), list(chain.parameters())))

    expected = []
    for chain in chains:
        chain.lookahead = 0
        expected.append(gradients(chain))
        chain.lookahead = 1
    results: list[list[list[Tensor]]] = [[], []]
    threads = [
        threading.Thread(target=lambda i=i: [results[i].append(gradients(chains[i])) for _ in range(8)]) for i in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for wanted, found in zip(expected, results, strict=True):
        assert len(found) == 8
        assert all(torch.equal(a, b) for each in found for a, b in zip(each, wanted, strict=True))


def test_two_threads_differentiate_one_graph():
    chain = told(5, lambda _: time.sleep(0.001), lambda _: None).double()
    for step in chain.steps:
        step.calls = -1000  # in any order
    y = chain(*torch.randn(2, 3, 6).double())
    loss, wanted = (y[0] * y[1]).sum(), list(chain.parameters())
    expected = torch.autograd.grad(loss, wanted, retain_graph=True)
    found: list[Any] = []

    def differentiate() -> None:
        for _ in range(5):
            found.append(torch.autograd.grad(loss, wanted, retain_graph=True))

    threads = [threading.Thread(target=differentiate) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 10
    for each in found:
        for a, b in zip(each, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_a_forked_process_has_a_thread_of_its_own():
    chain = told(3, lambda _: None, lambda _: None)
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

    chain = told(4, note, lambda _: None)
    chain.lookahead = 1
    threads = torch.get_num_threads()
    with torch.autocast("cpu", torch.bfloat16):
        y = chain(*torch.randn(2, 3, 6))
    (y[0] * y[1]).sum().backward()
    assert seen == [(True, threads)] * 4


@pytest.mark.parametrize("around", ["processes", "setting", "compiled autograd", "device", "dropout", "draws"])
def test_it_steps_aside_and_says_so(around, monkeypatch):
    recovered_in: list[threading.Thread] = []
    chain = told(4, lambda _: recovered_in.append(threading.current_thread()), lambda _: None)
    if around == "dropout":
        chain.steps[3].body.append(nn.Dropout(0.1))
    y = chain(*torch.randn(2, 3, 6))
    reasons = {
        "dropout": "a step draws random numbers",
        "draws": "or some were drawn since its forward",
        "processes": "several processes communicate",
        "setting": "settings of PyTorch that all threads share have changed",
        "compiled autograd": "backward is compiled",
        "device": "no side stream on mps",
    }
    if around == "draws":
        torch.rand(1)
    elif around == "processes":
        monkeypatch.setattr(lookahead, "processes_communicate", lambda: True)
    elif around == "setting":
        torch.use_deterministic_algorithms(True)
    elif around == "compiled autograd":
        monkeypatch.setitem(sys.modules, "torch._dynamo.compiled_autograd", SimpleNamespace(in_compiled_autograd_region=True))
    elif around == "device":
        monkeypatch.setattr("revzoo.runtime.recorded_call._Handle.device", torch.device("mps"))
    try:
        with pytest.warns(UserWarning, match=f"lookahead steps aside: .*{reasons[around]}") as found:
            (y[0] * y[1]).sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(found) == 1
    assert set(recovered_in) == {threading.main_thread()}


@pytest.mark.slow
def test_compiled_autograd_is_right():
    code = """
import torch, warnings
from torch import nn
from revzoo.runtime import ReversibleChain
chain = ReversibleChain([nn.Linear(6, 6) for _ in range(4)])
grads = []
for depth in (0, 1):
    chain.lookahead = depth
    x = torch.ones(2, 3, 6)
    y = chain(*x)
    with warnings.catch_warnings(record=True), torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        (y[0] * y[1]).sum().backward()
    grads.append([p.grad.clone() for p in chain.parameters()])
    chain.zero_grad()
assert all(torch.equal(a, b) for a, b in zip(*grads))
"""
    subprocess.run([sys.executable, "-c", code], check=True)


# The side stream of a GPU, with streams that write down what they are told.


class Stream:
    def __init__(self, name: str, log: list[str]):
        self.name, self.log = name, log

    def wait_stream(self, other: "Stream") -> None:
        self.log.append(f"{self.name} waits for all of {other.name}")

    def record_event(self) -> str:
        self.log.append(f"{self.name} marks")
        return f"mark of {self.name}"

    def wait_event(self, event: str) -> None:
        self.log.append(f"{self.name} waits for {event}")


class Current:
    """What `torch.cuda.stream` returns."""

    def __init__(self, stream: Stream, current: list[Stream]):
        self.stream, self.current = stream, current

    def __enter__(self) -> None:
        self.current.append(self.stream)

    def __exit__(self, *_: object) -> None:
        self.current.pop()


def test_the_side_stream(monkeypatch):
    log: list[str] = []
    main, side = Stream("main", log), Stream("side", log)
    current = [main]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: current[-1])
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: side)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: Current(stream, current))
    monkeypatch.setattr(lookahead, "_side_streams", {})
    monkeypatch.setattr(lookahead, "_choose_executor", lambda _: lookahead._recover_on_side_stream)
    monkeypatch.setattr(
        Tensor, "record_stream", lambda tensor, stream: log.append(f"{tuple(tensor.shape)} read by {stream.name}")
    )
    chain = told(
        3, lambda k: log.append(f"{current[-1].name} recovers {k}"), lambda k: log.append(f"{current[-1].name} gradient {k}")
    )
    backward(chain, *torch.randn(2, 3, 6))
    assert log == [
        "main recovers 3",
        "side waits for all of main",
        "(3, 6) read by side",
        "(3, 6) read by side",
        "side recovers 2",
        "side marks",
        "main gradient 3",
        "main waits for mark of side",
        "side waits for all of main",
        "(3, 6) read by side",
        "(3, 6) read by side",
        "side recovers 1",
        "side marks",
        "main gradient 2",
        "main waits for mark of side",
        "main gradient 1",
    ]


def test_kept_bits_are_among_what_the_side_stream_reads():
    chain = told(3, lambda _: None, lambda _: None)
    chain.couplings = (couplings["momentum"](kept_bits=8),) * 3
    read: list[list[tuple[Any, Any]]] = []
    original = lookahead._choose_executor

    def choose(recoverable: Any) -> Any:
        read.append([(t.dtype, t.numel()) for t in recoverable.sources])
        return original(recoverable)

    lookahead._choose_executor, restore = choose, original
    try:
        backward(chain, *torch.randn(2, 3, 6))
    finally:
        lookahead._choose_executor = restore
    states = [(torch.float32, 18)] * 2
    assert read == [[*states, (torch.uint8, 18)], states]  # the state before the first step is not rebuilt


# lookahead="auto"


@pytest.mark.parametrize(("gain", "chosen"), [(0.8, True), (0.97, True), (0.99, False), (1.2, False)])
def test_auto_keeps_what_is_faster(gain, chosen, monkeypatch):
    chain = told(3, lambda _: None, lambda _: None)
    chain.lookahead = "auto"
    clock = [0.0]
    ahead: list[bool] = []
    original = lookahead._recover_in_thread

    def recover(recoverable: Any) -> Any:
        ahead.append(True)
        return original(recoverable)

    def on_gradient(_: int) -> None:
        clock[0] += gain if ahead else 1.0

    for step in chain.steps:
        step.on_gradient = on_gradient
    monkeypatch.setattr(lookahead, "_recover_in_thread", recover)
    monkeypatch.setattr(lookahead_setting.time, "perf_counter", lambda: clock[0])
    x = torch.randn(2, 3, 6)
    seen = []
    for _ in range(16):
        ahead.clear()
        backward(chain, *x)
        seen.append(bool(ahead))
    trials = 2 * (lookahead_setting._WARM_UPS + lookahead_setting._TRIALS)
    assert seen[:trials] == [False, True] * (trials // 2)
    assert seen[trials:] == [chosen] * (16 - trials)
    ahead.clear()
    backward(chain, *torch.randn(2, 4, 6))  # another shape is measured anew
    assert not ahead


def test_auto_counts_no_backward_that_ends_early():
    """The first backward of the graph is counted, the second raises in the middle."""
    chain, fails = told(3, lambda _: None, lambda _: None), False

    def on_gradient(_: int) -> None:
        if fails:
            raise ValueError("stop here")

    chain.lookahead = "auto"
    chain.steps[0].on_gradient = on_gradient
    x = torch.randn(2, 3, 6).requires_grad_()
    y = chain(*x)
    loss = (y[0] * y[1]).sum()
    loss.backward(retain_graph=True)
    fails = True
    with pytest.raises(ValueError, match="stop here"):
        loss.backward()
    fails = False
    backward(chain, *x)
    (choice,) = chain._lookahead._choices.values()
    assert [len(times) for times in choice._times] == [1, 0]
    assert [timing.is_ahead for timing in choice._pending] == [True]


def test_the_setting_is_checked_copied_and_said():
    chain = ReversibleChain([nn.Linear(6, 6)])
    assert chain.lookahead == 0
    for wrong in (2, -1, True, "yes", None):
        with pytest.raises(InputError, match='lookahead is 0 or 1, the number of steps recovered ahead of backward, or "auto"'):
            chain.lookahead = wrong
    for depth in (1, "auto"):
        assert ReversibleChain([nn.Linear(6, 6)], lookahead=depth).lookahead == depth
        assert revzoo.create("rev_vit_digits", lookahead=depth, device="meta").lookahead == depth
        chain.lookahead = depth
        assert copy.deepcopy(chain).lookahead == depth
    assert list(chain.state_dict()) == ["steps.0.weight", "steps.0.bias"]


@pytest.mark.slow
def test_the_benchmark_measures_every_row(tmp_path):
    file, out = Path(__file__).parents[2] / "benchmarks" / "lookahead.py", tmp_path / "figures.json"
    subprocess.run([sys.executable, "-W", "error", str(file), "--quick", "--out", str(out)], check=True, capture_output=True)
    figures = json.loads(out.read_text())["figures"]
    assert all(figure["value"] > 0 for figure in figures)
    timed = [figure for figure in figures if figure["what"].startswith("time over stored")]
    assert len(timed) == 2 * 2 * 6
    assert sum("auto" in figure["what"] for figure in figures) == 4
    peaks = {figure["method"]: figure["value"] for figure in figures if figure["net"] == "conv" and "peak" in figure["what"]}
    assert peaks["lookahead=1"] - peaks["lookahead=0"] == pytest.approx(4, abs=0.1)  # three refilled tensors, and a state
