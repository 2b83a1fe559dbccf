"""The transition of converted ResNets: the ordinary block that changes width or size, with timm's parameter names."""

import torch.nn.functional as F
from torch import Tensor, nn

from revzoo.bounds import PositiveInt, UnitInterval
from revzoo.parts.context import BuildContext, Shape
from revzoo.parts.layers.join import Join, join_streams
from revzoo.parts.layers.preactivated_unit import UnitLayout
from revzoo.parts.layers.resnet_unit import ResNetUnit, divide_rounding_up
from revzoo.registry import transitions


@transitions.register("residual_block")
class ResidualBlock(ResNetUnit):
    """Fuse the streams, run an ordinary ResNet block that changes width or size, and give its output to both streams.

    x = fuse(x1, x2);  y1 = y2 = ReLU(unit(x) + downsample(x)), where downsample is a 1x1 convolution and BatchNorm.

    Shapes: x1, x2: (B, C, H, W) -> (B, width, H / stride, W / stride), rounded up.
    Args:
        layout: `basic` has two 3x3 convolutions, `bottleneck` has 1x1, 3x3 and 1x1.
        stride: stride of the first 3x3 convolution and of the shortcut.
        fuse: `mean` of the streams, or `last` for x2, the newer one, alone.
        middle: channels inside; null means the width, or a quarter of it in a bottleneck.
        groups: groups of a bottleneck's 3x3 convolution (ResNeXt).
        momentum: momentum of BatchNorm's running statistics.
    Source: ResNet (He et al. 2016), the first block of a layer, timm `resnet.py`; Re2TAL (Zhao et al. 2023) leaves it ordinary
        too.
    """

    def __init__(
        self,
        context: BuildContext,
        *,
        layout: UnitLayout = "basic",
        stride: PositiveInt = 1,
        fuse: Join = "mean",
        middle: PositiveInt | None = None,
        groups: PositiveInt = 1,
        momentum: UnitInterval = 0.1,
    ):
        super().__init__(context, "residual_block", layout, middle, groups, momentum, stride)
        self._fuse = fuse
        self.out_shape = Shape(context.width, divide_rounding_up(context.shape.size, stride), "image")
        projection = nn.Conv2d(context.shape.width, context.width, 1, stride, bias=False)
        self.downsample = nn.Sequential(projection, nn.BatchNorm2d(context.width, momentum=momentum))

    def forward(self, x1: Tensor, x2: Tensor) -> tuple[Tensor, Tensor]:
        x = join_streams(x1, x2, self._fuse)
        y = F.relu(self.compute_change(x) + self.downsample(x))
        return y, y
