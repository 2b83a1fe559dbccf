"""The stem of ordinary ResNets, with timm's parameter names."""

import torch.nn.functional as F
from torch import Tensor, nn

from revzoo.bounds import PositiveInt, UnitInterval
from revzoo.parts.context import BuildContext, Shape
from revzoo.parts.layers.resnet_unit import divide_rounding_up
from revzoo.registry import stems


@stems.register("resnet")
class ResNetStem(nn.Module):
    """Convolve 7x7 pixels, normalise, apply ReLU and max-pool: a quarter of the height and of the width.

    Shapes: (B, C, H, W) -> (B, width, H / 4, W / 4), where each of the two halvings rounds up.
    Args:
        width: number of channels.
        momentum: momentum of BatchNorm's running statistics.
    Source: ResNet (He et al. 2016), table 1; timm `resnet.py`. BatchNorm's eps is 1e-5.
    """

    def __init__(self, context: BuildContext, *, width: PositiveInt = 64, momentum: UnitInterval = 0.1):
        super().__init__()
        context.require_kind("image", "resnet")
        shape = context.shape
        self.out_shape = Shape(width, divide_rounding_up(divide_rounding_up(shape.size, 2), 2), "image")
        self.conv1 = nn.Conv2d(shape.width, width, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(width, momentum=momentum)

    def forward(self, x: Tensor) -> Tensor:
        return F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 3, 2, 1)
