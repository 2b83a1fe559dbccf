"""Recurrent layers and arguments that are left out: the promised peak, and the same gradients."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import revzoo
from revzoo.graph import ModulePlan, plan_module
from revzoo.runtime.live_bytes import LiveBytesOfReplacedCalls
from revzoo.runtime.nested import tensors_in


class Recurrent(nn.Module):
    """A recurrent layer between others. That of an LSTM keeps a workspace on the CPU which FakeTensors do not have."""

    def __init__(self, layer: Callable[..., nn.Module]):
        super().__init__()
        self.before, self.after = nn.Linear(8, 8), nn.Linear(8, 8)
        self.layer = layer(8, 8, 2, dropout=0.1)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.layer(F.gelu(self.before(x)).exp())
        return F.gelu(self.after(y.exp())).exp()


class Transposing(nn.Module):
    """The layout of a norm's result decides whether the next layer copies it, and the loss keeps the memory of its elements."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.BatchNorm1d(8, track_running_stats=False), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x.transpose(1, 2)).transpose(1, 2)
        return F.mse_loss(self.layer(y[:, None])[:, 0], x)


class Weighing(nn.Module):
    """Its loss is another calculation where a number is not given, as with `num_items_in_batch`."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))

    def forward(self, x: Tensor, count: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = F.dropout(F.gelu(layer(x)).exp(), 0.1)
        return x.square().mean() if count is None else x.square().sum() / count


def count_peak(module: nn.Module, batch: Any) -> int:
    with LiveBytesOfReplacedCalls() as live:
        live.watch([*module.parameters(), batch])
        loss = total(module(*batch))
        loss.backward()
    module.zero_grad()
    return live.peak()


def total(out: Any) -> Tensor:
    return sum(each.square().sum() for each in tensors_in(out))


def apply_least(module: nn.Module, batch: Any) -> ModulePlan:
    torch._dynamo.reset()
    plan, _ = plan_module(module, batch, None, loss=total)
    assert plan.drops_something
    plan.apply(module)
    return plan


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU])
def test_networks_with_recurrent_layers(layer: Callable[..., nn.Module], same_step: Callable[..., None]) -> None:
    module, batch = Recurrent(layer), (torch.randn(12, 4, 8),)
    plain = copy.deepcopy(module)
    plan = apply_least(module, batch)
    assert plan.peak_bytes < plan.no_recompute_peak_bytes
    assert count_peak(plain, batch) == plan.no_recompute_peak_bytes
    assert count_peak(module, batch) == plan.peak_bytes
    same_step(module, plain, batch)


@pytest.mark.parametrize(
    ("module", "batch"),
    [
        (nn.LSTM(8, 8), (torch.randn(11, 3, 8),)),  # its backward returns one gradient for two biases
        (Transposing(), (torch.randn(4, 16, 8),)),
        (nn.EmbeddingBag(8, 4, mode="max", include_last_offset=True), (torch.arange(8), torch.tensor([0, 3, 8]))),
    ],
    ids=["lstm", "transposed", "bag"],
)
def test_the_stored_peak_is_counted(module: nn.Module, batch: Any) -> None:
    stored = revzoo.plan(module, batch, "1GiB", loss=total).no_recompute_peak_bytes
    assert stored == count_peak(module, batch)


def test_a_call_without_an_argument_drops_what_is_planned(same_step: Callable[..., None]) -> None:
    module, x = Weighing(), torch.randn(64, 8)
    plain = copy.deepcopy(module)
    plan = apply_least(module, (x, torch.tensor(64.0)))
    with pytest.warns(UserWarning, match="differs from the one that was planned"):
        same_step(module, plain, (x,))
    assert count_peak(module, (x,)) < 1.1 * plan.peak_bytes < 0.8 * count_peak(plain, (x,))


def test_a_call_with_one_more_number_drops_what_is_planned(same_step: Callable[..., None]) -> None:
    """Transformers' Trainer adds `num_items_in_batch`."""
    module, x = Weighing(), torch.randn(64, 8)
    plain, batch = copy.deepcopy(module), (x, torch.tensor(64.0))
    plan = apply_least(module, (x,))
    with pytest.warns(UserWarning, match="differs from the one that was planned"):
        assert count_peak(module, batch) < 1.1 * plan.peak_bytes < 0.8 * count_peak(plain, batch)
    same_step(module, plain, batch)
