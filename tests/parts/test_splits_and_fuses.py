"""Splits and fuses against their definitions, and as each other's inverse."""

import pytest
import torch
import torch.nn.functional as F

from revzoo.errors import PartArgumentError
from revzoo.parts.context import BuildContext, Shape
from revzoo.parts.fuses import Concat, Last, Mean, PooledConcat
from revzoo.parts.splits import ChannelSplit, Duplicate

TOKENS = BuildContext(Shape(12, (2, 3), "tokens"), 12)
IMAGE = BuildContext(Shape(8, (6, 4), "image"), 8)


def test_splits_are_their_definitions():
    x, tokens = torch.randn(2, 8, 6, 4), torch.randn(2, 6, 12)
    assert all(half is x for half in Duplicate(IMAGE)(x))
    assert Duplicate(IMAGE).out_shape == IMAGE.shape
    assert torch.equal(torch.cat(ChannelSplit(IMAGE)(x), 1), x)
    assert torch.equal(torch.cat(ChannelSplit(TOKENS)(tokens), 2), tokens)
    assert ChannelSplit(IMAGE).out_shape == Shape(4, (6, 4), "image")


JOINS = {
    Concat: lambda x1, x2, dim: torch.cat((x1, x2), dim),
    Mean: lambda x1, x2, dim: (x1 + x2) / 2,
    Last: lambda x1, x2, dim: x2,
}


@pytest.mark.parametrize("fuse", JOINS)
def test_a_fuse_joins_and_normalises(fuse):
    for context, size, dim in ((IMAGE, (2, 8, 6, 4), 1), (TOKENS, (2, 6, 12), 2)):
        x1, x2 = torch.randn(2, *size).mul(1e-2).unbind()  # so small that eps matters
        joined = JOINS[fuse](x1, x2, dim)
        plain = fuse(context, norm="none")
        assert torch.equal(plain(x1, x2), joined)
        assert plain.out_shape == Shape(joined.shape[dim], context.shape.size, context.shape.kind)
        if context is IMAGE:
            normed = fuse(context, norm="batch_norm", momentum=0.25)
            expected = F.batch_norm(joined, None, None, training=True, eps=1e-3).relu()
            torch.testing.assert_close(normed(x1, x2), expected)
            torch.testing.assert_close(normed.norm.running_mean, 0.25 * joined.mean((0, 2, 3)))
            continue
        for norm, eps in (("layer_norm", 1e-6), ("layer_norm_1e-5", 1e-5)):
            expected = F.layer_norm(joined, joined.shape[-1:], eps=eps)
            torch.testing.assert_close(fuse(context, norm=norm)(x1, x2), expected)
        torch.testing.assert_close(fuse(context)(x1, x2), F.layer_norm(joined, joined.shape[-1:], eps=1e-6))


@pytest.mark.parametrize(("pool", "over_pixels"), [("mean", torch.mean), ("max", torch.amax)])
def test_streams_are_pooled_before_they_are_joined(pool, over_pixels):
    x1, x2 = torch.randn(2, 2, 8, 6, 4).unbind()
    fuse = PooledConcat(IMAGE, pool=pool)
    expected = over_pixels(torch.cat((x1, x2), 1), (2, 3), keepdim=True)
    torch.testing.assert_close(fuse(x1, x2), expected)
    assert fuse.out_shape == Shape(16, (1, 1), "image")
    one = PooledConcat(BuildContext(IMAGE.shape, 8, streams=1), pool=pool)
    torch.testing.assert_close(one(x1), expected[:, :8])
    torch.testing.assert_close(one(*x1.chunk(2, 1)), expected[:, :8])
    assert one.out_shape == Shape(8, (1, 1), "image")
    with pytest.raises(PartArgumentError, match="pooled_concat"):
        PooledConcat(TOKENS)


def test_split_and_fuse_are_each_others_inverse():
    for shape, size in ((Shape(4, (6, 4), "image"), (2, 4, 6, 4)), (Shape(4, (3,), "tokens"), (2, 3, 4))):
        x = torch.randn(size)
        split, fuse = ChannelSplit(BuildContext(shape, 4)), Concat(BuildContext(shape, 4), norm="none")
        assert torch.equal(split.inverse(*split(x)), x)
        assert all(map(torch.equal, fuse.inverse(fuse(x, 2 * x)), (x, 2 * x)))
    assert Concat(IMAGE, norm="batch_norm").inverse is None
