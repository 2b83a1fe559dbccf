"""Captured modules in whatever a training loop does around a call: the right gradients, or an error that says what to type."""

import copy
import re
from collections.abc import Callable
from threading import Thread
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from revzoo.errors import RecoveryError
from revzoo.graph.spans import SpanRecovery


class Small(nn.Module):
    """All that a recovery has to repeat: statistics, random numbers, changes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.norms = nn.ModuleList([nn.BatchNorm1d(3), nn.InstanceNorm1d(3, track_running_stats=True), nn.BatchNorm1d(3)])

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            y = F.dropout(norm(layer(x)).sigmoid(), 0.2)
            y += x
            x = y.tanh()
        return x


Pair = tuple[nn.Module, Callable[..., Any]]


@pytest.fixture(scope="module")
def modules(capture: Callable[..., Any]) -> tuple[nn.Module, Any, dict[str, Tensor]]:
    """Return a module, a captured copy of it, and their state; compiled once for all tests."""
    torch._dynamo.reset()
    module = Small().double()
    twin = copy.deepcopy(module)
    captured = capture(twin)
    captured.module = twin
    return module, captured, copy.deepcopy(module.state_dict())


@pytest.fixture(params=["one span", "kept subset"])
def pair(request: pytest.FixtureRequest, modules: Any) -> Pair:
    """Return a plain module, and a copy of it that is captured."""
    plain, captured, state = modules
    captured.use(request.param)
    for module in (plain, captured.module):
        module.load_state_dict(state)
        module.train().zero_grad()
    return plain, captured


def make_input(requires_grad: bool = True) -> Tensor:
    return torch.linspace(-1, 1, 36, dtype=torch.float64).reshape(2, 3, 6).requires_grad_(requires_grad)


def compare(pair: Pair, use: Callable[[Callable[..., Any], nn.Module], Any]) -> None:
    """Assert that `use` returns and leaves the same with both modules."""
    plain, captured = pair
    torch.manual_seed(1)
    expected = use(plain, plain)
    torch.manual_seed(1)
    got = use(captured, captured.module)
    assert captured.programs
    assert any(program.recipes for program in captured.programs)
    assert len(expected) == len(got) > 0
    expected = [*expected, *(p.grad for p in plain.parameters()), *plain.buffers()]
    got = [*got, *(p.grad for p in captured.module.parameters()), *captured.module.buffers()]
    for a, b in zip(got, expected, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b)


Run = Callable[..., Any]
USES: list[Callable[[Run, nn.Module], list[Any]]] = []


def use(function: Callable[[Run, nn.Module], list[Any]]) -> Callable[[Run, nn.Module], list[Any]]:
    USES.append(function)
    return function


@use
def a_retained_graph_is_recovered_again(run: Run, module: nn.Module) -> list[Any]:
    x = make_input()
    loss = run(x).square().sum()
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)
    loss.backward()
    return [x.grad]


@use
def gradients_of_some_inputs_then_of_all(run: Run, module: nn.Module) -> list[Any]:
    x = make_input()
    loss = run(x).square().sum()
    (first,) = torch.autograd.grad(loss, [module.layers[2].weight], retain_graph=True)
    rest = torch.autograd.grad(loss, [x, *module.parameters()], allow_unused=True)
    return [first, *(g for g in rest if g is not None)]


@use
def second_derivatives(run: Run, module: nn.Module) -> list[Any]:
    x = make_input()
    (dx,) = torch.autograd.grad(run(x).square().sum(), [x], create_graph=True)
    (dx * dx).sum().backward()
    return [dx.detach(), x.grad]


@use
def two_forwards_before_one_backward(run: Run, module: nn.Module) -> list[Any]:
    x = make_input()
    first, second = run(x), run(x * 2)
    (first * second).sum().backward()
    return [x.grad]


@use
def backward_in_another_thread_with_other_settings(run: Run, module: nn.Module) -> list[Any]:
    x = make_input()
    loss = run(x).square().sum()

    def differentiate() -> None:
        torch.manual_seed(7)
        with torch.autocast("cpu", torch.bfloat16):
            loss.backward()

    thread = Thread(target=differentiate)
    thread.start()
    thread.join()
    return [x.grad, torch.get_rng_state()]


@use
def steps_of_an_optimizer_with_accumulation(run: Run, module: nn.Module) -> list[Any]:
    optimizer = torch.optim.SGD(module.parameters(), 0.1, 0.9)
    for _ in range(3):
        optimizer.zero_grad()
        for part in make_input(False).split(1):
            run(torch.cat([part, part.flip(1)])).square().sum().backward()
        optimizer.step()
    return [parameter.detach() for parameter in module.parameters()]


@use
def calls_without_gradients_between(run: Run, module: nn.Module) -> list[Any]:
    x = make_input()
    loss = run(x).square().sum()
    with torch.no_grad():
        first = run(x)
    with torch.inference_mode():
        second = run(x).clone()
    module.eval()
    third = run(x)
    module.train()
    (loss + third.sum()).backward()
    return [x.grad, first, second, third]


@use
def hooks_on_saved_tensors_outside(run: Run, module: nn.Module) -> list[Any]:
    x = make_input()
    with torch.autograd.graph.save_on_cpu():
        loss = run(x).square().sum()
    loss.backward()
    return [x.grad]


@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
def test_what_a_training_loop_does(use: Callable[[Run, nn.Module], list[Any]], pair: Pair):
    compare(pair, use)


def test_functional_call(capture: Callable[..., Any]):
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Small().double()

        def forward(self, x: Tensor, values: dict[str, Tensor]) -> Tensor:
            return torch.func.functional_call(self.inner, values, (x,))

    module = Functional()
    twin = copy.deepcopy(module)
    captured = capture(twin)
    captured.module = twin

    def use(run: Callable[..., Any], twin: nn.Module) -> list[Tensor]:
        x = make_input()
        values = {name: (p.detach() * 2).requires_grad_() for name, p in twin.inner.named_parameters()}
        run(x, values).square().sum().backward()
        return [x.grad, *(v.grad for v in values.values())]

    compare((module, captured), use)


CHANGED = re.escape("was modified in place after forward") + ".*revzoo.release"


@pytest.mark.parametrize("changed", ["weight", "input"])
def test_a_change_in_place_before_backward_is_refused(changed: str, pair: Pair):
    x = make_input(False)
    loss = pair[1](x).square().sum()
    with torch.no_grad():
        (x if changed == "input" else pair[1].module.layers[1].weight).add_(1)
    with pytest.raises(RecoveryError, match=CHANGED):
        loss.backward()


def test_a_changed_output_that_is_kept_is_refused(pair: Pair):
    _, captured = pair
    captured.use("everything kept")
    out = captured(make_input())
    out.detach().add_(1)
    with pytest.raises(RecoveryError, match=CHANGED):
        out.sum().backward()


def test_a_changed_output_that_was_dropped_is_recovered(pair: Pair):
    def use(run: Callable[..., Any], module: nn.Module) -> list[Tensor]:
        x = make_input()
        out = run(x)
        loss = out.sum()
        if run is not module:
            out.detach().add_(1)
        loss.backward()
        return [x.grad]

    pair[1].use("one span")
    compare(pair, use)


def test_slots_that_no_recovery_refills_are_an_error(capture: Callable[..., Any]):
    captured = capture(lambda x: x.sin().sin())
    captured(make_input())
    (program,) = captured.programs
    program.recipes[0] = SpanRecovery((), (), (), ())
    with pytest.raises(RecoveryError, match=r"^sin saved other tensors in this call than in the first"):
        captured(make_input()).sum().backward()


@pytest.mark.parametrize("way", ["backward", "deleted", "retained", "failed"])
def test_nothing_of_a_step_stays_alive(way: str, pair: Pair, watching: Any):
    _, captured = pair
    captured(make_input()).sum().backward()  # the compiler keeps what it likes of the first call
    batch = make_input()
    inputs = [batch if isinstance(t, Tensor) and t.shape == batch.shape else t for t in captured.inputs]
    captured.inputs = ()
    with watching:
        loss = captured.programs[0](*inputs)[0].square().sum()
        if way == "retained":
            loss.backward(retain_graph=True)
        elif way == "backward":
            loss.backward()
        elif way == "failed":
            with torch.no_grad():
                captured.module.layers[1].weight.add_(1)
            with pytest.raises(RecoveryError):
                loss.backward()
    captured.module.zero_grad()
    del loss, inputs, batch
    assert watching.count_alive([*captured.module.parameters(), *captured.module.buffers()]) == 0
