"""FLOPs of forward and backward, by hand."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import flop_registry

from revzoo.analysis.flops import FlopCounter, count_flops
from revzoo.errors import InputError
from revzoo.runtime import ReversibleChain

MM = 2 * 5 * 8 * 8  # one product of (5, 8) and (8, 8)


class Attention(nn.Linear):
    def forward(self, x):
        return nn.functional.scaled_dot_product_attention(x, super().forward(x), x)


def test_a_linear_layer_is_three_products():
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    assert count_flops(model, torch.zeros(5, 8)) == 5 * MM  # the first layer's input needs no gradient
    assert count_flops(model, torch.zeros(5, 8, requires_grad=True)) == 6 * MM


ATTENTION = 3 * 2 * 7 * 8 * 8 * 3 + (2 + 5) * 2 * 3 * 7 * 7 * 8  # a linear layer's three products, attention's two and five


def test_attention_counts_alike_on_the_cpu_on_meta_and_in_a_real_run(monkeypatch):
    """Also where PyTorch's own table has no attention, as that of 2.14 has none for the CPU."""
    products = {torch.ops.aten.mm: flop_registry[torch.ops.aten.mm]}
    monkeypatch.setattr("torch.utils.flop_counter.flop_registry", products)
    model, x = Attention(8, 8, bias=False), torch.zeros(3, 1, 7, 8, requires_grad=True)
    with torch.device("meta"):
        on_meta = Attention(8, 8, bias=False), torch.zeros(3, 1, 7, 8, requires_grad=True)
    assert count_flops(model, x) == count_flops(*on_meta) == ATTENTION
    with FlopCounter() as flops:
        model(x).sum().backward()
    assert flops.forward + flops.backward == ATTENTION


def test_an_lstm_is_its_products():
    x = torch.zeros(3, 5, 8, requires_grad=True)
    assert count_flops(nn.LSTM(8, 8), x) == 3 * 4 * 2 * 3 * MM  # forward and backward: for each gate, of inputs and of states


def test_fewer_heads_of_keys_than_of_queries():
    q, k = torch.zeros(2, 4, 7, 8, requires_grad=True), torch.zeros(2, 2, 9, 8, requires_grad=True)
    with FlopCounter() as flops:
        nn.functional.scaled_dot_product_attention(q, k, k, enable_gqa=True).sum().backward()
    products = 2 * 2 * 4 * 7 * 9 * 8
    assert (flops.forward, flops.backward) == (2 * products, 5 * products)


def test_a_formula_that_a_user_registers_counts(monkeypatch):
    monkeypatch.setitem(flop_registry, torch.ops.aten.sin, lambda x, out_val: 10 * x.numel())
    with FlopCounter() as flops:
        torch.zeros(5).sin().cos()
    assert (flops.forward, flops.backward) == (50, 0)


@pytest.mark.parametrize(("mode", "extra"), [("store", 0), ("selective", 0), ("recompute", 4), ("invert", 7)])
def test_modes_of_a_chain(mode, extra):
    """Each step has two linear layers; nothing is saved after the second, so a run that may stop early skips it."""
    chain = ReversibleChain([nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)) for _ in range(4)])
    chain.schedule = mode
    x = [torch.zeros(5, 8, requires_grad=True) for _ in range(2)]
    assert count_flops(chain, x) == (4 * 6 + extra) * MM


def test_nothing_is_computed():
    with torch.device("meta"):
        model = nn.Sequential(nn.Conv2d(3, 1024, 3), nn.BatchNorm2d(1024))
    assert count_flops(model, torch.empty(1, 3, 258, 258)) == 2 * 2 * 9 * 3 * 1024 * 256 * 256


def test_nothing_to_differentiate_is_said():
    with pytest.raises(InputError, match="No parameter"):
        count_flops(nn.GELU(), torch.zeros(3))


def test_grouped_convolutions_count_their_own_channels():
    """PyTorch's formula takes the weight's gradient for that of an ungrouped convolution."""
    layer = 2 * 3 * 8 * 9 * 5 * 5  # 3 examples, 8 channels of 5 x 5, a kernel of 9
    model = nn.Sequential(*(nn.Conv2d(8, 8, 3, padding=1, groups=8) for _ in range(2)))
    assert count_flops(model, torch.zeros(3, 8, 5, 5)) == (3 + 2) * layer
    assert count_flops(nn.ConvTranspose2d(8, 4, 3, stride=2), torch.zeros(3, 8, 5, 5)) == 2 * 4 * layer


def test_forward_and_backward_are_counted_apart_also_when_backward_runs_a_forward():
    chain = ReversibleChain([nn.Linear(8, 8) for _ in range(3)])
    x = [torch.zeros(5, 8, requires_grad=True) for _ in range(2)]
    with FlopCounter() as flops:
        sum(chain(*x)).sum().backward()
    assert (flops.forward, flops.backward) == (3 * MM, (3 * 2 + 2) * MM)
