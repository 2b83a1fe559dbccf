"""RevNet's parts against independent formulas, on the same weights."""

import pytest
import torch
import torch.nn.functional as F

from revzoo.parts.branches.convolution import ConvBranch
from revzoo.parts.context import BuildContext, Shape
from revzoo.parts.stems.convolution import ConvStem
from revzoo.parts.transitions.residual import ResidualPair

TOKENS = BuildContext(Shape(12, (2, 3), "tokens"), 12)
IMAGE = BuildContext(Shape(8, (6, 4), "image"), 8)


def unit(x, parameters, kernels, stride=1, preactivate=True):
    """BN-ReLU-conv in functional form; parameters in order of the unit's own."""
    left = iter(parameters)
    for i, kernel in enumerate(kernels):
        if i > 0 or preactivate:
            x = F.relu(F.batch_norm(x, None, None, next(left), next(left), training=True, eps=1e-3))
        x = F.conv2d(x, next(left), stride=stride if i == 0 else 1, padding=kernel // 2)
    assert next(left, None) is None
    return x


@pytest.mark.parametrize(
    ("layout", "kernels", "widths"), [("basic", (3, 3), [8, 8, 8]), ("bottleneck", (1, 3, 1), [8, 2, 2, 8])]
)
def test_conv_unit_is_the_formula(layout, kernels, widths):
    branch = ConvBranch(IMAGE, layout=layout)
    convolutions = [module for module in branch.modules() if isinstance(module, torch.nn.Conv2d)]
    assert [8, *(conv.out_channels for conv in convolutions)] == widths
    x = torch.randn(2, 8, 6, 4)
    torch.testing.assert_close(branch(x), unit(x, branch.parameters(), kernels))


@pytest.mark.parametrize("preactivate", [True, False])
def test_basic_residual_pair_is_the_formula(preactivate):
    pair = ResidualPair(BuildContext(IMAGE.shape, 12), stride=2, layout="basic", preactivate=preactivate)
    assert pair.out_shape == Shape(12, (3, 2), "image")
    x1, x2 = torch.randn(2, 2, 8, 6, 4).unbind()

    def shortcut(x):
        zeros = torch.zeros(2, 2, 3, 2)
        return torch.cat((zeros, F.avg_pool2d(x, 2), zeros), 1)

    y1 = shortcut(x1) + unit(x2, pair.f.parameters(), (3, 3), 2, preactivate)
    y2 = shortcut(x2) + unit(y1, pair.g.parameters(), (3, 3))
    torch.testing.assert_close(pair(x1, x2), (y1, y2))


def test_bottleneck_residual_pair_is_the_formula():
    pair = ResidualPair(BuildContext(IMAGE.shape, 16), stride=2, layout="bottleneck")
    x1, x2 = torch.randn(2, 2, 8, 6, 4).unbind()
    y1 = F.conv2d(x1, pair.shortcut1.weight, stride=2) + unit(x2, pair.f.parameters(), (1, 3, 1), 2)
    y2 = F.conv2d(x2, pair.shortcut2.weight, stride=2) + unit(y1, pair.g.parameters(), (1, 3, 1))
    torch.testing.assert_close(pair(x1, x2), (y1, y2))
    unchanged = ResidualPair(IMAGE, layout="basic", preactivate=False)
    z1 = x1 + unit(x2, unchanged.f.parameters(), (3, 3), 1, False)
    torch.testing.assert_close(unchanged(x1, x2)[0], z1)


def test_conv_stem_is_the_formula():
    stem = ConvStem(BuildContext(Shape(3, (8, 8), "image"), 3), width=4, kernel=7, stride=2, pool=True)
    x = torch.randn(2, 3, 8, 8)
    y = F.conv2d(x, stem.conv.weight, stride=2, padding=3)
    y = F.relu(F.batch_norm(y, None, None, stem.norm.weight, stem.norm.bias, training=True, eps=1e-3))
    torch.testing.assert_close(stem(x), F.max_pool2d(y, 3, 2, 1))
    assert stem.out_shape == Shape(4, (2, 2), "image")
