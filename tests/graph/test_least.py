"""The smallest peak that a plan names is reached when it is asked for, and storing everything is among the candidates."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import revzoo
from revzoo.graph import plan_module


class DenseBlock(nn.Module):
    """One whose layers read all earlier results."""

    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(8 + 4 * i, 4 if i < 2 else 8, 3, padding=1) for i in range(3))

    def forward(self, x):
        seen = [x]
        for conv in self.convs[:-1]:
            seen.append(F.leaky_relu(conv(torch.cat(seen, 1)), 0.2, inplace=True))
        return x + 0.2 * self.convs[-1](torch.cat(seen, 1))


class Dense(nn.Sequential):
    """One whose smallest plan takes more than was predicted."""

    def __init__(self):
        super().__init__(DenseBlock(), DenseBlock())

    def forward(self, x):
        return x + 0.2 * super().forward(x)


class Dilated(nn.Module):
    """A WaveNet, whose smallest plan takes less than was predicted."""

    def __init__(self):
        super().__init__()
        self.filters = nn.ModuleList(nn.Conv1d(8, 16, 2, dilation=2**i) for i in range(4))
        self.outputs, self.skips = (nn.ModuleList(nn.Conv1d(8, 8, 1) for _ in range(4)) for _ in range(2))

    def forward(self, x):
        total = 0
        for i, (filter, output, skip) in enumerate(zip(self.filters, self.outputs, self.skips, strict=True)):
            a, b = filter(F.pad(x, (2**i, 0))).chunk(2, 1)
            z = torch.tanh(a) * torch.sigmoid(b)
            total, x = total + skip(z), x + output(z)
        return F.relu(total)


class Curvature(nn.Sequential):
    """One that differentiates twice in its forward, as physics-informed networks do, where a span recovers too early."""

    def __init__(self):
        super().__init__(*(layer for _ in range(3) for layer in (nn.Linear(16, 16), nn.Tanh())))

    def forward(self, x):
        x = x.detach().requires_grad_()
        (first,) = torch.autograd.grad(super().forward(x).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
        return second + first


CASES = [(Dense, torch.randn(1, 8, 12, 12)), (Dilated, torch.randn(2, 8, 64)), (Curvature, torch.randn(256, 16))]


@pytest.mark.parametrize(("make", "batch"), CASES, ids=["dense", "dilated", "curvature"])
def test_the_least_that_is_named_is_reached(make: type[nn.Module], batch: Any):
    torch._dynamo.reset()
    module = make()
    stored = revzoo.plan(module, batch, "1TB").no_recompute_peak_bytes
    plan, _ = plan_module(module, batch, None)
    named = plan.min_peak_bytes or plan.peak_bytes
    assert named <= plan.peak_bytes <= stored
    least = revzoo.plan(module, batch, named)
    assert least.peak_bytes == named
    with pytest.raises(revzoo.errors.BudgetError, match=rf"\({named} bytes\) are needed"):
        revzoo.plan(module, batch, named - 1)
    least.apply(module)
    assert revzoo.measure_memory(module, batch).peak_bytes == named


def test_the_update_of_an_optimizer_may_be_the_peak():
    """`foreach` copies the weights: no plan is below what they take together with gradients and state."""
    module, batch = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.GELU()))), torch.randn(16, 64)
    optimizer = torch.optim.AdamW(module.parameters(), foreach=True)
    without = revzoo.plan(module, batch, "1TB")
    plan = revzoo.plan(module, batch, "1TB", optimizer=optimizer)
    weights = sum(p.nbytes for p in module.parameters())
    state = 2 * weights + sum(4 for _ in module.parameters())  # two moments, and a count for each
    loss = 4
    assert plan.peak_bytes == 2 * weights + batch.nbytes + loss + state + weights > without.peak_bytes + state
    assert plan.peak_bytes == revzoo.measure_memory(module, batch, optimizer).peak_bytes
    with pytest.raises(revzoo.errors.BudgetError, match=rf"\({plan.peak_bytes} bytes\) are needed, at the optimizer's update"):
        revzoo.plan(module, batch, plan.peak_bytes - 1, optimizer=optimizer)
