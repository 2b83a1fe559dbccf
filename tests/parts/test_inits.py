"""Initialisations have the spread that their docstrings state."""

import pytest
import torch
from torch import nn

import revzoo
from revzoo.parts.inits import FanIn, FanOut, Normal, TruncatedNormal


def test_inits_have_the_stated_spread():
    linear, conv, norm = torch.nn.Linear(400, 300), torch.nn.Conv2d(20, 50, 3), torch.nn.LayerNorm(4)
    TruncatedNormal(std=0.02, bias=0.02)(linear)
    assert linear.weight.std().item() == pytest.approx(0.02, rel=0.01)
    assert linear.weight.abs().max() > 0.07  # cut at 2, not at two deviations
    assert linear.bias.unique().tolist() == pytest.approx([0.02])
    TruncatedNormal(bias=0.02)(norm)
    assert norm.bias.unique().tolist() == pytest.approx([0.02])
    before = conv.weight.clone()
    TruncatedNormal()(conv)
    assert torch.equal(conv.weight, before)
    TruncatedNormal(convolutions=True)(conv)
    assert conv.weight.std().item() == pytest.approx(0.02, rel=0.03)
    FanIn()(linear)
    assert linear.weight.std().item() == pytest.approx(400**-0.5 * 0.8796, rel=0.02)  # of a normal cut at two deviations
    assert linear.weight.abs().max() <= 2 * 400**-0.5
    assert linear.bias.unique().tolist() == [0]
    FanOut()(conv)
    assert conv.weight.std().item() == pytest.approx((2 / (9 * 50)) ** 0.5 * 0.8796, rel=0.05)
    FanOut()(linear)
    assert linear.weight.abs().max().item() == pytest.approx((3 / 400) ** 0.5, rel=0.01)


def test_normal_init_is_transformers():
    linear, table, norm = nn.Linear(400, 300), nn.Embedding(500, 200, padding_idx=3), nn.LayerNorm(4)
    for module in (linear, table, norm):
        Normal(std=0.02)(module)
    assert linear.weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert linear.weight.abs().max() > 0.06  # not cut
    assert linear.bias.unique().tolist() == [0]
    assert table.weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert [i for i in range(500) if table.weight[i].abs().max() == 0] == [3]
    assert (norm.weight.unique().tolist(), norm.bias.unique().tolist()) == ([1], [0])


@pytest.mark.parametrize(("name", "drawn"), [("rev_vit_s", True), ("rev_mvit_b", True), ("rev_swin_t", False)])
def test_transformers_start_as_their_sources(name, drawn):
    """Every linear weight has the standard deviation 0.02, in Rev-ViT and Rev-MViT every convolution too."""
    small = ["stages.0.depth=1", "stages.2.depth=1"] if name != "rev_vit_s" else ["stages.0.depth=1"]
    model = revzoo.build(revzoo.load_spec(name, small))
    linear = [m.weight for m in model.modules() if isinstance(m, nn.Linear)]
    assert torch.cat([weight.flatten() for weight in linear]).std().item() == pytest.approx(0.02, rel=0.01)
    biases = [m.bias for m in model.modules() if isinstance(m, (nn.Linear, nn.LayerNorm)) and m.bias is not None]
    assert torch.cat(biases).unique().tolist() == pytest.approx([0.02])
    convolutions = [m.weight.flatten() for m in model.modules() if isinstance(m, nn.Conv2d)]
    assert (torch.cat(convolutions).std().item() == pytest.approx(0.02, rel=0.02)) is drawn
