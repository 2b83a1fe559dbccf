"""FLOPs of forward and backward, by hand."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import flop_registry

from revzoo.analysis.flops import FlopCounter, count_flops, count_operation_flops
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


@pytest.mark.parametrize("registry", ["pytorch", "empty"])
def test_attention_counts_alike_on_the_cpu_on_meta_and_in_a_real_run(registry, monkeypatch):
    """Also where PyTorch's own table has no attention, as that of 2.14 has none for the CPU."""
    if registry == "empty":
        monkeypatch.setattr("torch.utils.flop_counter.flop_registry", {})
    model, x = Attention(8, 8, bias=False), torch.zeros(3, 1, 7, 8, requires_grad=True)
    assert count_flops(model, x) == ATTENTION
    assert (
        count_flops(Attention(8, 8, bias=False, device="meta"), torch.zeros_like(x, device="meta").requires_grad_())
        == ATTENTION
    )
    with FlopCounter() as flops:
        model(x).sum().backward()
    assert flops.forward + flops.backward == ATTENTION


def test_fewer_heads_of_keys_than_of_queries():
    q, k = torch.zeros(2, 4, 7, 8, requires_grad=True), torch.zeros(2, 2, 9, 8, requires_grad=True)
    with FlopCounter() as flops:
        nn.functional.scaled_dot_product_attention(q, k, k, enable_gqa=True).sum().backward()
    products = 2 * 2 * 4 * 7 * 9 * 8
    assert (flops.forward, flops.backward) == (2 * products, 5 * products)


def test_formulas_agree_with_pytorchs():
    """But for those of convolutions with groups, which PyTorch counts wrongly, all that PyTorch knows of the operations."""
    q, k, v = torch.zeros(2, 3, 5, 8), torch.zeros(2, 3, 7, 8), torch.zeros(2, 3, 7, 6)
    x, w, out = torch.zeros(2, 4, 9, 9), torch.zeros(6, 4, 3, 3), torch.zeros(2, 6, 7, 7)
    convolution = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    arguments = {
        "mm": ((torch.zeros(2, 3), torch.zeros(3, 4)), torch.zeros(2, 4)),
        "addmm": ((torch.zeros(4), torch.zeros(2, 3), torch.zeros(3, 4)), torch.zeros(2, 4)),
        "bmm": ((torch.zeros(5, 2, 3), torch.zeros(5, 3, 4)), torch.zeros(5, 2, 4)),
        "baddbmm": ((torch.zeros(4), torch.zeros(5, 2, 3), torch.zeros(5, 3, 4)), torch.zeros(5, 2, 4)),
        "convolution": ((x, w, None, *convolution), out),
        "convolution_backward": ((out, x, w, [0], *convolution, [True, True, False]), (x, w, None)),
        "_scaled_dot_product_flash_attention": ((q, k, v), torch.zeros(2, 3, 5, 6)),
        "_scaled_dot_product_flash_attention_backward": ((torch.zeros(2, 3, 5, 6), q, k, v), (q, k, v)),
    }
    for name, (args, result) in arguments.items():
        operation = getattr(torch.ops.aten, name).default
        count = count_operation_flops(operation, args, {}, result)
        assert count == flop_registry[operation.overloadpacket](*args, out_val=result) > 0


def test_a_formula_that_a_user_registers_counts(monkeypatch):
    monkeypatch.setitem(flop_registry, torch.ops.aten.sin, lambda x, out_val: 10 * x.numel())
    with FlopCounter() as flops:
        torch.zeros(5).sin().cos()
    assert (flops.forward, flops.backward) == (50, 0)


@pytest.mark.parametrize(("mode", "extra"), [("store", 0), ("selective", 0), ("recompute", 4), ("invert", 7)])
def test_modes_of_a_chain(mode, extra):
    """Each step has two linear layers; nothing is saved behind the second, so a run that may stop early skips it."""
    chain = ReversibleChain([nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)) for _ in range(4)])
    chain.schedule = mode
    x = [torch.zeros(5, 8, requires_grad=True) for _ in range(2)]
    assert count_flops(chain, x) == (4 * 6 + extra) * MM


def test_nothing_is_computed_and_the_model_is_left_as_found():
    with torch.device("meta"):
        model = nn.Sequential(nn.Conv2d(3, 1024, 3), nn.BatchNorm2d(1024))
    assert count_flops(model, torch.empty(1, 3, 258, 258)) == 2 * 2 * 9 * 3 * 1024 * 256 * 256
    norm = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    count_flops(norm, torch.randn(3, 4))
    assert norm[1].num_batches_tracked == 0
    assert all(p.grad is None for p in norm.parameters())


def test_views_given_to_modules_without_gradients_are_no_obstacle():
    """The hooks of FlopCounterMode's own module tracker fail here."""

    class Normalised(nn.Linear):
        def __init__(self):
            super().__init__(8, 8)
            self.norm = nn.LayerNorm(8)

        def forward(self, x):
            with torch.no_grad():
                mean = self.norm(x[:])
            return super().forward(x - mean)

    assert count_flops(Normalised(), torch.zeros(5, 8, requires_grad=True)) == 3 * MM


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
