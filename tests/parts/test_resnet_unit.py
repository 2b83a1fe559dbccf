"""Parts of ordinary ResNets: a step and a transition against timm's blocks on the same weights."""

import pytest
import torch
from timm.models.resnet import BasicBlock, Bottleneck, ResNet

from revzoo.parts.branches.convolution import ResidualUnit
from revzoo.parts.context import BuildContext, Shape
from revzoo.parts.transitions.residual import ResidualBlock

IMAGE = BuildContext(Shape(8, (6, 5), "image"), 8)


@pytest.mark.parametrize("layout", ["basic", "bottleneck"])
def test_the_parts_are_timms_block(layout):
    kind = {"basic": BasicBlock, "bottleneck": Bottleneck}[layout]
    block = kind(8, 8 // kind.expansion).eval()
    f, alone = (ResidualUnit(IMAGE, layout=layout, residual=residual).eval() for residual in (True, False))
    for part in (f, alone):
        part.load_state_dict(block.state_dict())
    x = torch.randn(2, 8, 6, 5)
    torch.testing.assert_close(f(x), block(x), rtol=0, atol=0)
    unit = f.compute_change(x)
    torch.testing.assert_close(alone(x), unit.relu(), rtol=0, atol=0)
    torch.testing.assert_close(f(x), (unit + x).relu(), rtol=0, atol=0)


@pytest.mark.parametrize("fuse", ["mean", "last"])
def test_the_transition_is_timms_first_block_on_the_fused_streams(fuse):
    original = ResNet(Bottleneck, (1, 1, 1, 1), channels=(2, 3, 3, 3)).layer2[0].eval()
    part = ResidualBlock(BuildContext(IMAGE.shape, 12), layout="bottleneck", stride=2, fuse=fuse).eval()
    part.load_state_dict(original.state_dict())
    x1, x2 = torch.randn(2, 2, 8, 6, 5).unbind()
    y1, y2 = part(x1, x2)
    assert y1 is y2
    assert part.out_shape == Shape(12, (3, 3), "image")
    torch.testing.assert_close(y1, original(x2 if fuse == "last" else (x1 + x2) / 2), rtol=0, atol=0)
