"""The pooling head against its formula: images, tokens, a class token, masks."""

import torch
import torch.nn.functional as F

from revzoo.parts.context import BuildContext, Shape
from revzoo.parts.heads.pooled_linear import PooledLinear

TOKENS = BuildContext(Shape(12, (2, 3), "tokens"), 12)
IMAGE = BuildContext(Shape(8, (6, 4), "image"), 8)


def test_head_pools_and_resets():
    head = PooledLinear(IMAGE, outputs=5)
    x = torch.randn(2, 8, 6, 4)
    torch.testing.assert_close(head(x), head.linear(x.mean((2, 3))))
    largest = PooledLinear(TOKENS, outputs=5, pool="max")
    tokens = torch.randn(2, 6, 12)
    torch.testing.assert_close(largest(tokens), largest.linear(tokens.max(1).values))
    head.double().reset(3)
    assert head.outputs == 3
    assert head.linear.weight.dtype == torch.float64


def test_head_of_a_class_token():
    tokens, mask = torch.randn(2, 6, 12), torch.tensor([[True] * 4 + [False] * 2, [True] * 6])
    first = PooledLinear(TOKENS, outputs=5, pool="first", fc_norm="layer_norm")
    expected = first.linear(F.layer_norm(tokens[:, 0], (12,), eps=1e-6))
    torch.testing.assert_close(first(tokens), expected)
    torch.testing.assert_close(first(tokens, mask), expected)
    for pool, function in (("mean", lambda x: x.mean(0)), ("max", lambda x: x.amax(0))):
        others = PooledLinear(TOKENS, outputs=5, pool=pool, class_token=True)
        pooled = torch.stack([function(x[1:]) for x in tokens])
        torch.testing.assert_close(others(tokens), others.linear(pooled))
        seen = torch.stack([function(tokens[0, 1:4]), function(tokens[1, 1:])])
        torch.testing.assert_close(others(tokens, mask), others.linear(seen))


def test_the_head_normalises_before_pooling():
    head, x = PooledLinear(IMAGE, outputs=5, norm="batch_norm", momentum=0.9), torch.randn(2, 8, 6, 4)
    normed = F.batch_norm(x, None, None, training=True, eps=1e-5)
    torch.testing.assert_close(head(x), head.linear(normed.relu().mean((2, 3))))
    torch.testing.assert_close(head.norm.running_mean, 0.9 * x.mean((0, 2, 3)))
