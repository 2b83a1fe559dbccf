"""The ordinary networks of the RevNet paper, which no library has: pre-activated ResNets of revnet-public."""

from typing import NamedTuple

from torch import Tensor, nn

from revzoo.parts.context import BuildContext, Shape
from revzoo.parts.conv import UnitLayout, conv_unit
from revzoo.parts.norm import batch_norm
from revzoo.parts.stem import ConvStem
from revzoo.parts.transition import shortcut


class ResNetLayout(NamedTuple):
    """Units of each stage, widths of the stem and the stages, their units' layout, and whether the stem shrinks images."""

    depths: tuple[int, ...]
    widths: tuple[int, ...]
    layout: UnitLayout
    shrinks: bool = False


# Source: revnet-public resnet/configs/cifar_configs.py and imagenet_configs.py; widths of bottlenecks are 4 times theirs.
RESNETS = {
    "resnet_32": ResNetLayout((5, 5, 5), (16, 16, 32, 64), "basic"),
    "resnet_110": ResNetLayout((18, 18, 18), (16, 16, 32, 64), "basic"),
    "resnet_164": ResNetLayout((18, 18, 18), (16, 64, 128, 256), "bottleneck"),
    "resnet_50": ResNetLayout((3, 4, 6, 3), (64, 256, 512, 1024, 2048), "bottleneck", True),
    "resnet_101": ResNetLayout((3, 4, 23, 3), (64, 256, 512, 1024, 2048), "bottleneck", True),
}


class ResNet(nn.Module):
    """Run residual units of stem, branch and shortcut as RevNet's, one stream instead of two.

    Shapes: (B, C, H, W) -> (B, outputs).
    Args:
        channels: C.
        size: H and W, divisible by 4, or by 32 where the stem shrinks.
    Source: He et al. 2016, "Identity Mappings in Deep Residual Networks", as in revnet-public `resnet_model.py`.
    """

    def __init__(self, layout: ResNetLayout, channels: int, size: tuple[int, ...], outputs: int):
        super().__init__()
        width, *widths = layout.widths
        site = BuildContext(Shape(channels, size, "image"), channels)
        large = layout.shrinks
        self.stem = ConvStem(site, width=width, kernel=7 if large else 3, stride=2 if large else 1, pool=large)
        self.units = nn.ModuleList()
        for stage, (depth, out_width) in enumerate(zip(layout.depths, widths, strict=True)):
            for index in range(depth):
                stride = 2 if stage > 0 and index == 0 else 1
                self.units.append(_Unit(width, out_width, stride, layout.layout, preactivate=len(self.units) > 0))
                width = out_width
        self.norm = batch_norm(width, momentum=0.01)
        self.linear = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for unit in self.units:
            x = unit(x)
        logits: Tensor = self.linear(self.norm(x).mean((2, 3)))
        return logits


class _Unit(nn.Module):
    def __init__(self, width: int, out_width: int, stride: int, layout: UnitLayout, preactivate: bool):
        super().__init__()
        self.f = conv_unit(width, out_width, layout=layout, stride=stride, preactivate=preactivate)
        self.shortcut = shortcut(width, out_width, stride, layout)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.shortcut(x) + self.f(x)
        return y
