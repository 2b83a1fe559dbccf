"""The transition of ordinary ResNets: the block that changes width or size, with timm's parameter names."""

import torch.nn.functional as F
from torch import Tensor, nn

from revzoo.bounds import PositiveInt, UnitInterval
from revzoo.parts.context import BuildContext, Shape
from revzoo.parts.layers.preactivated_unit import UnitLayout
from revzoo.parts.layers.resnet_unit import ResNetUnit, divide_rounding_up
from revzoo.registry import transitions


@transitions.register("downsampling_block")
class DownsamplingBlock(ResNetUnit):
    """Run a ResNet block that changes width or size, in a network on one tensor (`split: none`).

    y = ReLU(unit(x) + downsample(x)), where downsample is a 1x1 convolution and BatchNorm.

    Shapes: (B, C, H, W) -> (B, width, H / stride, W / stride), rounded up.
    Args:
        layout: `basic` has two 3x3 convolutions, `bottleneck` has 1x1, 3x3 and 1x1.
        stride: stride of the first 3x3 convolution and of the shortcut.
        momentum: momentum of BatchNorm's running statistics.
    Source: ResNet (He et al. 2016), the first block of a layer, timm `resnet.py`.
    """

    takes_one_tensor = True

    def __init__(
        self,
        context: BuildContext,
        *,
        layout: UnitLayout = "basic",
        stride: PositiveInt = 2,
        momentum: UnitInterval = 0.1,
    ):
        super().__init__(context, "downsampling_block", layout, None, 1, momentum, stride)
        self.out_shape = Shape(context.width, divide_rounding_up(context.shape.size, stride), "image")
        projection = nn.Conv2d(context.shape.width, context.width, 1, stride, bias=False)
        self.downsample = nn.Sequential(projection, nn.BatchNorm2d(context.width, momentum=momentum))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.compute_change(x) + self.downsample(x))
