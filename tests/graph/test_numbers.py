"""Numbers that change from step to step: one graph for all values, the gradients of the plain module, and a bound on graphs."""

import copy
import gc
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn import functional as F

import revzoo
from revzoo.graph import plan_module
from revzoo.graph.spanned_graph import SpannedGraph

BATCH = torch.linspace(-1, 1, 512).view(64, 8)


class Annealed(nn.Module):
    """One that computes with a number between its layers."""

    def __init__(self, compute: Callable[[Tensor, Any], Tensor], number: Any = 0.9):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.compute, self.number = compute, number

    def forward(self, x: Tensor, weight: float = 1.0) -> Tensor:
        for layer in self.layers:
            x = x + self.compute(F.gelu(layer(x)).tanh(), self.number) * weight
        return x


@pytest.fixture
def train(same_step: Callable[..., None]) -> Callable[..., list[int]]:
    """Return a function that trains a planned module with one value after another, and returns how many graphs each took."""
    torch._dynamo.reset()

    def run(module: nn.Module, values: list[Any], place: nn.Module | None = None, name: str = "number") -> list[int]:
        plan, _ = plan_module(module, BATCH, None)
        plain, graphs = copy.deepcopy(module), []
        places = [module, plain] if place is None else [place, dict(plain.named_modules())[find(module, place)]]
        plan.apply(module, BATCH)
        for value in values:
            for each in places:
                setattr(each, name, value)
            before = counters["stats"]["unique_graphs"]
            same_step(module, plain, BATCH)
            graphs.append(counters["stats"]["unique_graphs"] - before)
        return graphs

    return run


def find(module: nn.Module, part: nn.Module) -> str:
    return next(name for name, each in module.named_modules() if each is part)


VALUES = [0.9, 0.8, 0.7, 0.65, 0.6]


@pytest.mark.parametrize(
    ("compute", "values"),
    [
        (lambda x, t: torch.softmax(x / t, -1), VALUES),
        (lambda x, t: x * (1 - t) + x.sin() * max(t, 0.1) ** 2, VALUES),
        (lambda x, t: x * (1 + math.cos(math.pi * t)) if t > 0.5 else x, VALUES),
        (lambda x, t: torch.lerp(x, x.sin(), t).add(x, alpha=-t).clamp(-t, t), VALUES),
        (lambda x, t: x + torch.randn_like(x) * torch.tensor(t), VALUES),
        (lambda x, t: x * t + t, [3, 4, 5, 6, 7]),
    ],
    ids=["temperature", "weights", "cosine", "functions", "noise", "integers"],
)
def test_a_number_that_changes_becomes_an_input(compute: Any, values: list[Any], train: Callable[..., list[int]]):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert train(Annealed(compute, values[0]), values) == [1, 1, 0, 0, 0]


def test_an_argument_may_be_such_a_number(train: Callable[..., list[int]]):
    module, plain = (Annealed(lambda x, t: x.sin()) for _ in range(2))
    plain.load_state_dict(module.state_dict())
    plan_module(module, {"x": BATCH, "weight": 1.0}, None)[0].apply(module)
    compiled = counters["stats"]["unique_graphs"]
    for weight in (1.0, 0.9, 0.8, 0.7):
        for each in (module, plain):
            each.zero_grad()
            each(x=BATCH, weight=weight).square().sum().backward()
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(module.parameters(), plain.parameters(), strict=True))
    assert counters["stats"]["unique_graphs"] - compiled == 2


def test_the_peak_is_the_promised_one_with_every_value():
    torch._dynamo.reset()
    module = Annealed(lambda x, t: x / t)
    stored = revzoo.plan(module, BATCH, "1TB").peak_bytes
    plan = revzoo.plan(module, BATCH, revzoo.plan(module, BATCH, stored - 1).min_peak_bytes)
    plan.apply(module)
    for value in VALUES:
        module.number = value
        assert revzoo.measure_memory(module, BATCH).peak_bytes == plan.peak_bytes


class Dropping(Annealed):
    """One with a rate, of which the compiler makes a constant."""

    def __init__(self):
        super().__init__(lambda x, t: x)
        self.drop = nn.Dropout(0.05)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(super().forward(x)) * 2


def test_a_number_that_stays_a_constant_is_named_and_its_graphs_are_bounded(train: Callable[..., list[int]]):
    module = Dropping()
    rates = [0.1 + 0.01 * step for step in range(20)]
    with pytest.warns(UserWarning, match="is compiled anew again and again") as caught:
        assert train(module, rates, module.drop, "p") == [1] * 20
    (message,) = {str(each.message) for each in caught}
    assert "module.drop.p == 0." in message
    gc.collect()
    assert sum(type(each) is SpannedGraph for each in gc.get_objects()) <= 8


@pytest.mark.parametrize(
    "compute",
    [
        lambda x, t: x * float(f"{t:.2f}"),  # which the compiler cannot do with an input
        lambda x, t: F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.1, scale=t)[0],  # several calls
        lambda x, t: x[: int(t * 64)].sum() * x,  # a size
    ],
    ids=["text", "attention", "size"],
)
@pytest.mark.filterwarnings("ignore:A call of Annealed differs")
def test_where_an_input_does_not_do_it_is_a_constant(compute: Any, train: Callable[..., list[int]]):
    assert train(Annealed(compute), VALUES)[0] == 1


def test_a_plan_holds_for_another_number_of_its_own_kind(train: Callable[..., list[int]]):
    """A rate of nothing is another kind: a step without a mask keeps less."""
    module = Annealed(F.dropout, 0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert train(module, [0.2, 0.3]) == [1, 1]
    with pytest.warns(UserWarning, match="A call of Annealed differs from the one that was planned"):
        train(Annealed(F.dropout, 0.1), [0.0])
