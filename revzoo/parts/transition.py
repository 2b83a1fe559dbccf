"""Transitions change width or size of both streams between stages: ordinary, stored modules, or bijections."""

import torch.nn.functional as F
from torch import Tensor, nn

from revzoo.bijection import SpaceToDepth
from revzoo.bounds import PositiveInt, UnitInterval
from revzoo.errors import PartArgumentError
from revzoo.parts.context import BuildContext, Shape
from revzoo.parts.conv import UnitLayout, conv_unit
from revzoo.registry import transitions


@transitions.register("residual_pair")
class ResidualPair(nn.Module):
    """Run a two-stream residual unit whose shortcuts change size and width, so that it cannot be inverted.

    y1 = shortcut(x1) + F(x2);  y2 = shortcut(x2) + G(y1).

    Shapes: x1, x2: (B, C, H, W) -> (B, width, H / stride, W / stride).
    Args:
        stride: of F and both shortcuts; divides the sides.
        layout: of F and G. A basic shortcut pools and pads with zero channels, a bottleneck's is a 1x1 convolution.
        preactivate: whether F begins with BN-ReLU (not directly behind a stem, which ends with one).
        momentum: of BatchNorm's running statistics.
    Source: RevNet, the first unit of each stage (revnet-public `revnet_model.py`; facts of the shortcut from
        `resnet_model.py`: average pooling, symmetric zero channels, projections without norm).
    """

    def __init__(
        self,
        at: BuildContext,
        *,
        stride: PositiveInt = 1,
        layout: UnitLayout = "basic",
        preactivate: bool = True,
        momentum: UnitInterval = 0.01,
    ):
        super().__init__()
        width = at.shape.width
        at.require("image", "residual_pair")
        if any(side % stride for side in at.shape.size):
            raise PartArgumentError("stride", stride, f"a divisor of the sides {at.shape.size}")
        if layout == "bottleneck" and at.width % 4:
            raise PartArgumentError("layout", layout, f"basic, or a width divisible by 4 instead of {at.width}")
        if layout == "basic" and (at.width < width or (at.width - width) % 2):
            raise PartArgumentError(
                "layout", layout, f"bottleneck, or a width of {width} plus an even number instead of {at.width}"
            )
        self.out_shape = Shape(at.width, tuple(side // stride for side in at.shape.size), "image")
        self.f = conv_unit(width, at.width, layout=layout, stride=stride, preactivate=preactivate, momentum=momentum)
        self.g = conv_unit(at.width, at.width, layout=layout, momentum=momentum)
        self.shortcut1 = shortcut(width, at.width, stride, layout)
        self.shortcut2 = shortcut(width, at.width, stride, layout)

    def forward(self, x1: Tensor, x2: Tensor) -> tuple[Tensor, Tensor]:
        y1 = self.shortcut1(x1) + self.f(x2)
        y2 = self.shortcut2(x2) + self.g(y1)
        return y1, y2


@transitions.register("space_to_depth")
class Squeeze(SpaceToDepth):
    """Fold squares of pixels into the channels of each stream; nothing is lost, and nothing is stored.

    Shapes: x: (B, C, H, W) -> (B, block^2 C, H / block, W / block), for both streams.
    Args:
        block: side of a square [pixels]; divides the sides.
    Source: i-RevNet (Jacobsen et al. 2018), psi.
    """

    def __init__(self, at: BuildContext, *, block: PositiveInt = 2):
        super().__init__(block)
        at.require("image", "space_to_depth")
        if any(side % block for side in at.shape.size):
            raise PartArgumentError("block", block, f"a divisor of the sides {at.shape.size}")
        width = block * block * at.shape.width
        if at.width != width:
            raise PartArgumentError("type", "space_to_depth", f"a stage of width {width} (block^2 times {at.shape.width})")
        self.out_shape = Shape(width, tuple(side // block for side in at.shape.size), "image")


def shortcut(width: int, out_width: int, stride: int, layout: UnitLayout) -> nn.Module:
    """Return what stands beside a `conv_unit` of this layout that changes size or width.

    Source: revnet-public `resnet_model.py`, `_possible_downsample` and `_possible_bottleneck_downsample`.
    """
    if stride == 1 and width == out_width:
        return nn.Identity()
    if layout == "basic":
        return _PoolAndPad(stride, (out_width - width) // 2)
    return nn.Conv2d(width, out_width, 1, stride, bias=False)


class _PoolAndPad(nn.Module):
    """Average-pool by `stride` and add `channels` zero channels on either side."""

    def __init__(self, stride: int, channels: int):
        super().__init__()
        self.stride, self.channels = stride, channels

    def forward(self, x: Tensor) -> Tensor:
        if self.stride > 1:
            x = F.avg_pool2d(x, self.stride)
        return F.pad(x, (0, 0, 0, 0, self.channels, self.channels)) if self.channels else x
