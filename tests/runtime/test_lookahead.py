"""Look-ahead: the order of recoveries and gradients, the same bits as without it, and its memory."""

import copy
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import revzoo
from revzoo.errors import InputError, RecoveryError
from revzoo.registry import couplings
from revzoo.runtime import LiveBytes, ReversibleChain, conditions, lookahead, settings

MODES = {
    "invert": "invert",
    "recompute": "recompute",
    "selective": "selective",
    "mixed": ["invert", "recompute", "selective", "invert", "store", "invert", "invert"],
}


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


Listener = Callable[[int], None]


def pass_(_: int) -> None:
    pass


class Told(nn.Module):
    """A step that tells when it is recovered and differentiated."""

    def __init__(self, number: int, on_recovery: Listener = pass_, on_gradient: Listener = pass_, p: float = 0.0):
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


def told(count: int, on_recovery: Listener = pass_, on_gradient: Listener = pass_, modes: Any = "invert") -> ReversibleChain:
    chain = ReversibleChain([Told(i + 1, on_recovery, on_gradient) for i in range(count)], lookahead=1)
    chain.schedule = modes
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


class Linear(nn.Module):
    """A step that saves its input, its hidden state and nothing else."""

    def __init__(self, hidden: int):
        super().__init__()
        self.first, self.second = nn.Linear(6, hidden, bias=False), nn.Linear(hidden, 6, bias=False)

    def forward(self, w: Tensor) -> Tensor:
        return self.second(self.first(w).sigmoid())


ORDER = {1: "r1 g1", 2: "r2 r1 g2 g1", 5: "r5 r4 g5 r3 g4 r2 g3 r1 g2 g1", 6: "r6 r5 g6 r4 g5 r3 g4 r2 g3 r1 g2 g1"}


@pytest.mark.parametrize("modes", ["invert", "recompute", "selective"])
@pytest.mark.parametrize("count", ORDER)
def test_the_order_of_recoveries_and_gradients(count, modes):
    events: list[str] = []
    chain = told(count, lambda k: events.append(f"r{k}"), lambda k: events.append(f"g{k}"), modes)
    with Unseen():
        backward(chain, *torch.randn(2, 3, 6))
    assert " ".join(events) == ORDER[count]


def test_stored_steps_are_passed_over():
    events: list[str] = []
    modes = ["invert", "store", "recompute", "store", "store", "invert"]
    chain = told(6, lambda k: events.append(f"r{k}"), lambda k: events.append(f"g{k}"), modes)
    with Unseen():
        backward(chain, *torch.randn(2, 3, 6))
    assert " ".join(events) == "r6 r3 g6 g5 g4 r1 g3 g2 g1"


@pytest.mark.parametrize("count", [2, 5])
def test_a_recovery_runs_during_the_gradient_of_the_step_after_it(count):
    """Each recovery but the first waits for that gradient to begin, and that gradient for the recovery: they must overlap."""
    recovering = {k: threading.Event() for k in range(count + 1)}
    differentiating = {k: threading.Event() for k in range(count + 2)}
    seconds = 20

    def on_recovery(k: int) -> None:
        recovering[k].set()
        assert k == count or differentiating[k + 1].wait(seconds), f"gradient {k + 1} did not begin during recovery {k}"

    def on_gradient(k: int) -> None:
        differentiating[k].set()
        assert k == 1 or recovering[k - 1].wait(seconds), f"recovery {k - 1} did not begin during gradient {k}"

    backward(told(count, on_recovery, on_gradient), *torch.randn(2, 3, 6))


# Where the two threads meet: in the second run, in the gradient, and where one of them begins, ends or waits.
MEETINGS = {
    "recovery": (Told, "on_recovery"),
    "gradient": (Told, "on_gradient"),
    "start": (lookahead.Lookahead, "start"),
    "finish": (lookahead.Lookahead, "finish"),
    "forget": (lookahead.Lookahead, "forget"),
    "turn": (conditions, "take_turn"),
    "settings": (settings.Settings, "enter"),
}


@pytest.mark.parametrize("meeting", MEETINGS)
@pytest.mark.parametrize("modes", ["invert", "mixed"])
def test_delays_change_no_bit(modes, meeting, monkeypatch):
    """Either thread is held up wherever they meet; BatchNorm's statistics and kept bits would show a race."""
    owner, name = MEETINGS[meeting]
    function = getattr(owner, name, lambda *_: None)

    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(0.001)
        out = function(*args, **kwargs)
        time.sleep(0.001)
        return out

    count = 7
    chain = told(count)
    for step in chain.steps:
        step.body.insert(2, nn.BatchNorm1d(12))
        if owner is Told:
            setattr(step, name, slow)
    if owner is not Told:
        monkeypatch.setattr(owner, name, slow)
    chain.couplings = (couplings["momentum"](kept_bits=3),) * count
    chain.schedule = MODES[modes]
    assert_same_with_and_without(chain, *torch.randn(2, 5, 6), repeats=1)


@pytest.mark.parametrize("modes", MODES)
@pytest.mark.parametrize("coupling", ["additive", "leapfrog", couplings["momentum"](kept_bits=4)])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.filterwarnings("ignore:lookahead steps aside. a step draws")
def test_bits_are_those_of_the_serial_backward(modes, coupling, dropout):
    chain = ReversibleChain([Told(i, p=dropout) for i in range(7)], coupling)
    chain.schedule = MODES[modes]
    assert_same_with_and_without(chain, *torch.randn(2, 4, 6))


@pytest.mark.parametrize("name", ["irevnet_digits", "rev_mvit_digits", "revnet_digits"])
@pytest.mark.filterwarnings("ignore:lookahead steps aside. a step draws")
def test_models_with_several_chains_and_nodes(name):
    """Nodes between chains are looked ahead to as well."""
    model = revzoo.create(name, schedule="stage_inputs")
    batch, state = model.example_input(2), copy.deepcopy(model.state_dict())
    grads = []
    for depth in (0, 1, 1):
        model.lookahead = depth
        torch.manual_seed(0)
        model.load_state_dict(state)
        grads.append(torch.autograd.grad(model(batch).square().sum(), list(model.parameters())))
    for other in grads[1:]:
        assert all(torch.equal(a, b) for a, b in zip(grads[0], other, strict=True))


def test_a_node_between_chains_is_recovered_ahead():
    """The head is asked for first, the last step is the next one."""
    model = revzoo.create("rev_vit_digits", schedule="stage_inputs", lookahead=1)
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
    assert "fuse" in order  # but not the stem, a convolution: what it saves is its input and weight
    assert len(order) >= len(model.steps) + 1


def test_a_retained_graph():
    chain = told(5).double()
    y = chain(*torch.randn(2, 3, 6).double())
    loss, wanted = (y[0] * y[1]).sum(), list(chain.parameters())
    first, *others = (torch.autograd.grad(loss, wanted, retain_graph=True) for _ in range(4))
    for other in others:
        torch.testing.assert_close(first, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("modes", ["invert", "recompute"])
def test_what_backward_does_not_ask_for_is_forgotten(modes):
    """Only the gradients of the last three steps are wanted, so the recovery of the third step is for nobody."""
    recovered: list[int] = []
    chain = told(6, recovered.append, modes=modes)
    x, wanted = torch.randn(2, 3, 6), [p for step in chain.steps[3:] for p in step.parameters()]
    grads = []
    for chain.lookahead in (1, 0):
        y = chain(*x)
        grads.append(torch.autograd.grad((y[0] * y[1]).sum(), wanted))
        for step in chain.steps:
            step.calls = 0
    assert recovered == [6, 5, 4, 3, 6, 5, 4]
    assert all(map(torch.equal, *grads))


@pytest.mark.parametrize("used", [0, 1])
def test_an_output_that_never_reaches_the_loss(used):
    chain, grads = told(5), []
    x, wanted = torch.randn(2, 3, 6), list(chain.parameters())
    for chain.lookahead in (0, 1):
        grads.append(torch.autograd.grad(chain(*x)[used].square().sum(), wanted, allow_unused=True))
    assert grads[0].count(None) < len(wanted)
    assert all(a is b if a is None else torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_the_tripwire_names_a_step_recovered_ahead():
    chain = told(4)
    chain.steps[1].on_recovery = lambda _: chain.steps[1].body[1].register_forward_hook(lambda *args: args[-1] * 1.1)
    with pytest.raises(RecoveryError, match=r"steps\.1 ran differently the second time"):
        backward(chain, *torch.randn(2, 3, 6))


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


def test_the_setting_is_checked_and_copied():
    chain = ReversibleChain([nn.Linear(6, 6)], lookahead=1)
    for wrong in (2, True, None):
        with pytest.raises(InputError, match=f"lookahead is 0 or 1, .*Received: {wrong!r}"):
            chain.lookahead = wrong
    assert copy.deepcopy(chain).lookahead == revzoo.create("rev_vit_digits", lookahead=1, device="meta").lookahead == 1


class Stream:
    """The stream of a device, which writes down what it is told."""

    def __init__(self, name: str, log: list[str], current: list["Stream"]):
        self.name, self.log, self.current = name, log, current

    def __enter__(self) -> None:
        self.current.append(self)

    def __exit__(self, *_: object) -> None:
        self.current.pop()

    def wait_stream(self, other: "Stream") -> None:
        self.log.append(f"{self.name} waits for all of {other.name}")

    def record_event(self) -> str:
        self.log.append(f"{self.name} marks")
        return f"mark of {self.name}"

    def wait_event(self, event: str) -> None:
        self.log.append(f"{self.name} waits for {event}")


def test_the_side_stream(monkeypatch):
    log: list[str] = []
    current: list[Stream] = []
    main, side = Stream("main", log, current), Stream("side", log, current)
    current.append(main)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda _: current[-1])
    monkeypatch.setattr(torch, "Stream", lambda _: side)
    monkeypatch.setattr(lookahead, "_side_streams", {})
    monkeypatch.setattr(lookahead, "_choose_executor", lambda _: lookahead._recover_on_side_stream)
    monkeypatch.setattr(Tensor, "record_stream", lambda x, stream: log.append(f"{stream.name} reads {x.numel()} {x.dtype}"))
    chain = told(
        3, lambda k: log.append(f"{current[-1].name} recovers {k}"), lambda k: log.append(f"{current[-1].name} gradient {k}")
    )
    chain.couplings = (couplings["momentum"](kept_bits=8),) * 3
    backward(chain, *torch.randn(2, 3, 6))
    states = ["side reads 18 torch.float32"] * 2
    assert log == [
        "main recovers 3",
        "side waits for all of main",
        *states,
        "side reads 18 torch.uint8",  # the state before the first step is not rebuilt, so the recovery of 1 reads no bits
        "side recovers 2",
        "side marks",
        "main gradient 3",
        "main waits for mark of side",
        "side waits for all of main",
        *states,
        "side recovers 1",
        "side marks",
        "main gradient 2",
        "main waits for mark of side",
        "main gradient 1",
    ]
