"""FLOPs of forward and backward, by hand."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from revzoo.analysis.flops import FlopCounter, count_flops
from revzoo.errors import InputError
from revzoo.runtime import ReversibleChain

MM = 2 * 5 * 8 * 8  # one product of (5, 8) and (8, 8)


def test_a_linear_layer_is_three_products():
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    assert count_flops(model, torch.zeros(5, 8)) == 5 * MM  # the first layer's input needs no gradient
    assert count_flops(model, torch.zeros(5, 8, requires_grad=True)) == 6 * MM


def test_attention_counts():
    class Attention(nn.Linear):
        def forward(self, x):
            return nn.functional.scaled_dot_product_attention(x, super().forward(x), x)

    linear, attention = 2 * 7 * 8 * 8 * 3, 2 * 3 * 2 * 7 * 7 * 8
    flops = count_flops(Attention(8, 8, bias=False), torch.zeros(3, 1, 7, 8, requires_grad=True))
    assert flops == 3 * linear + attention + attention // 2 * 5


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


def test_real_models_compute_nothing_either():
    class Fussy(nn.Linear):
        def forward(self, x):
            assert isinstance(x, FakeTensor)
            return super().forward(x)

    assert count_flops(Fussy(8, 8), torch.zeros(5, 8)) == 2 * MM


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
