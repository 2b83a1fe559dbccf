"""Parameters that change inside backward, when their gradients are complete: the weights are those of changing them after."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from revzoo.runtime.chain import ReversibleChain
from revzoo.runtime.complete_gradients import take_gradients
from revzoo.runtime.schedule import MODES

SCHEDULES = (*MODES, ["store", "invert", "selective", "invert"])


class AddsBias(nn.Module):
    """A step whose bias has its gradient before the step runs again."""

    def __init__(self):
        super().__init__()
        self.linear, self.bias = nn.Linear(6, 6, bias=False), nn.Parameter(torch.zeros(6))

    def forward(self, w: Tensor) -> Tensor:
        return self.linear(w.tanh()) + self.bias


class Twice(nn.Module):
    """A step that uses its weight twice, once without a gradient, and a parameter that it does not use."""

    def __init__(self):
        super().__init__()
        self.linear, self.unused = nn.Linear(6, 6), nn.Parameter(torch.zeros(6))

    def forward(self, w: Tensor) -> Tensor:
        return self.linear(self.linear(w).sin())


class Scale(nn.Module):
    """A step that saves nothing but its input, and runs again for the state in front of it, after its gradient."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(6))

    def forward(self, w: Tensor) -> Tensor:
        return w * self.weight


def make_steps(kind: str) -> list[nn.Module]:
    torch.manual_seed(0)
    if kind == "shared":
        steps = [nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)) for _ in range(4)]
        steps[3][0].weight = steps[0][2].weight
        steps[2][2].weight = steps[2][0].weight
        return steps
    if kind == "frozen":
        steps = [nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)) for _ in range(4)]
        for p in (*steps[0].parameters(), steps[2][0].weight):
            p.requires_grad_(False)
        return steps
    make: Callable[[], nn.Module] = {"bias": AddsBias, "twice": Twice, "scale": Scale}[kind]
    return [make() for _ in range(4)]


def change(p: nn.Parameter) -> None:
    with torch.no_grad():
        p.sub_(p.grad, alpha=0.1)
    p.grad = None


def train(chain: ReversibleChain, inside: bool) -> list[int]:
    """Make three updates and return, for each, how many parameters were changed inside backward."""
    changed, counts = [], []

    def take(p: nn.Parameter) -> None:
        changed.append(p)
        change(p)

    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        changed.clear()
        x = torch.randn(2, 5, 6, generator=generator, dtype=torch.float64)
        with take_gradients(chain.parameters() if inside else (), take):
            y1, y2 = chain(*x.requires_grad_())
            (y1 * y2.cos()).sum().backward()
        counts.append(len(changed))
        for p in chain.parameters():
            if p.grad is not None:
                change(p)
    return counts


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("kind", ["bias", "twice", "scale", "shared", "frozen"])
def test_weights_are_those_of_changing_them_afterwards(kind, schedule):
    chain = ReversibleChain(make_steps(kind)).double()
    chain.schedule = schedule
    other = copy.deepcopy(chain)
    train(chain, inside=False)
    counts = train(other, inside=True)
    for (name, p), q in zip(chain.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q), name
    assert min(counts) > 0
