"""Arguments that do not fit what arrives, or each other, are named with what is allowed (see test_context.py, too)."""

import pytest

from revzoo.errors import PartArgumentError
from revzoo.parts.branches.attention import AttentionBranch, PoolingAttention
from revzoo.parts.branches.convolution import ConvBranch, IRevNetUnit, ResidualUnit
from revzoo.parts.branches.mlp import MlpBranch
from revzoo.parts.branches.reformer import LSHAttention
from revzoo.parts.branches.window_attention import WindowBranch
from revzoo.parts.context import BuildContext, Shape
from revzoo.parts.fuses import Concat, Mean
from revzoo.parts.heads.pooled_linear import PooledLinear
from revzoo.parts.heads.text import MaskedLM
from revzoo.parts.splits import ChannelSplit
from revzoo.parts.stems.convolution import ConvStem, PadStem
from revzoo.parts.stems.patches import OverlapPatchStem, PatchStem
from revzoo.parts.stems.text import TokenStem
from revzoo.parts.transitions.bijective import SpaceToDepthTransition
from revzoo.parts.transitions.fuse_merge_split import FuseMergeSplit
from revzoo.parts.transitions.fuse_pool_split import FusePoolSplit
from revzoo.parts.transitions.multiscale_block import MultiScaleTransition
from revzoo.parts.transitions.residual import ResidualPair


def image(width=8, size=(6, 4), out=None):
    return BuildContext(Shape(width, size, "image"), out or width)


def tokens(*size, width=12, out=None):
    return BuildContext(Shape(width, size, "tokens"), out or width)


def text(padding=None):
    return BuildContext(Shape(50, (16,), "text"), 50, padding=padding)


@pytest.mark.parametrize(
    ("part", "context", "options", "argument", "allowed"),
    [
        (AttentionBranch, tokens(2, 3), {"heads": 5}, "heads", "a divisor of the width 12"),
        (AttentionBranch, image(), {"heads": 2}, "type", "a stem that gives tokens"),
        (MlpBranch, tokens(2, 3), {"ratio": 0.01}, "ratio", "leaves a hidden channel of the width 12"),
        (PoolingAttention, tokens(4, 4), {"heads": 2, "kv_stride": 3}, "kv_stride", "both sides of the 4x4 grid"),
        (PoolingAttention, tokens(4, 6), {"heads": 2, "relative_position": True}, "relative_position", "a square grid"),
        (LSHAttention, tokens(32), {"heads": 2, "bucket": 33}, "bucket", "at most 32"),
        (WindowBranch, tokens(13, 13), {"heads": 3, "window": 5}, "window", "1, 13 or more on the 13x13 grid"),
        (IRevNetUnit, image(), {"kernels": (3, 2, 3)}, "kernels", "odd numbers"),
        (IRevNetUnit, image(6), {}, "bottleneck", "a divisor of the width 6"),
        (ResidualUnit, image(), {"layout": "bottleneck", "middle": 6, "groups": 4}, "groups", "a divisor of the 6 channels"),
        (ResidualUnit, image(), {"groups": 2}, "groups", "1, or the layout bottleneck"),
        (ConvBranch, image(6), {"layout": "bottleneck"}, "layout", "divisible by 4"),
        (ConvStem, image(), {"width": 8, "kernel": 4}, "kernel", "an odd number"),
        (ConvStem, image(), {"width": 8, "stride": 2, "pool": True}, "stride", "divisible by stride times 2"),
        (PadStem, image(3), {"width": 2}, "width", "an even number, at least the 3 channels"),
        (PadStem, image(1), {"width": 8}, "block", "at least 2"),
        (PatchStem, image(), {"width": 8, "patch": 4}, "patch", "a divisor of both sides of the 6x4 image"),
        (OverlapPatchStem, image(3, (8, 8)), {"width": 8, "kernel": 4}, "kernel", "an odd number"),
        (TokenStem, text(50), {"width": 12}, "type", "an input.padding below 50"),
        (TokenStem, text(), {"width": 12, "position": "after_padding"}, "position", "padding"),
        (TokenStem, text(), {"width": 11, "position": "sinusoidal"}, "width", "even"),
        (SpaceToDepthTransition, image(3, out=13), {}, "type", "a stage of width 12"),
        (ResidualPair, image(out=6), {}, "layout", "a width of 8 plus an even number instead of 6"),
        (ResidualPair, image(out=18), {"layout": "bottleneck"}, "layout", "divisible by 4 instead of 18"),
        (FuseMergeSplit, tokens(8, 7), {}, "down", "8x7"),
        (FusePoolSplit, tokens(4, 4, width=8), {"heads": 2, "fuse_ratio": 0.01}, "fuse_ratio", "a hidden channel"),
        (MultiScaleTransition, tokens(4, 4, width=8, out=16), {"heads": 2, "widening_heads": 3}, "widening_heads", "width 8"),
        (ChannelSplit, image(3), {}, "type", "an even number .* the stem gives 3"),
        (Concat, tokens(2, 3), {"norm": "batch_norm"}, "norm", "batch_norm or none for images"),
        (Mean, image(), {}, "norm", "batch_norm or none for images"),
        (PooledLinear, image(), {"outputs": 5, "pool": "first"}, "pool", "mean or max"),
        (PooledLinear, image(), {"outputs": 5, "class_token": True}, "class_token", "false"),
        (PooledLinear, tokens(2, 3), {"outputs": 5, "norm": "batch_norm"}, "norm", "none for tokens"),
        (MaskedLM, tokens(16), {}, "type", "a stem with a table of embeddings"),
    ],
)
def test_what_does_not_fit_is_named(part, context, options, argument, allowed):
    with pytest.raises(PartArgumentError, match=allowed) as error:
        part(context, **options)
    assert error.value.argument == argument
