"""The transition of converted MViTs against timm's blocks on the same streams."""

import pytest
import torch

from revzoo.parts.context import BuildContext, Shape
from revzoo.parts.transitions.multiscale_block import MultiScaleTransition


@pytest.mark.parametrize("fuse", ["mean", "last"])
@pytest.mark.parametrize("widening", [None, 1])
def test_the_transition_is_timms_blocks_on_the_fused_streams(fuse, widening):
    context = BuildContext(Shape(8, (4, 4), "tokens"), 16)
    part = MultiScaleTransition(context, heads=2, kv_stride=2, fuse=fuse, widening_heads=widening, widening_kv_stride=4)
    x1, x2 = torch.randn(2, 2, 16, 8).unbind()
    y1, y2 = part(x1, x2)
    assert y1 is y2
    assert part.out_shape == Shape(16, (2, 2), "tokens")
    expected, grid = x2 if fuse == "last" else (x1 + x2) / 2, [4, 4]
    assert len(part.blocks) == (1 if widening is None else 2)
    for block in part.blocks:
        expected, grid = block(expected, grid)
    assert list(grid) == [2, 2]
    torch.testing.assert_close(y1, expected, rtol=0, atol=0)
