"""Convolutional branches: pre-activated units, without the residual, which the coupling is."""

from collections import OrderedDict
from typing import Literal

from timm.layers import DropPath
from torch import nn

from revzoo.bounds import UnitInterval
from revzoo.errors import PartArgumentError
from revzoo.parts.context import BuildContext
from revzoo.parts.norm import batch_norm
from revzoo.registry import branches

UnitLayout = Literal["basic", "bottleneck"]


def conv_unit(
    width: int, out_width: int, *, layout: UnitLayout, stride: int = 1, preactivate: bool = True, momentum: float = 0.01
) -> nn.Sequential:
    """Return BN-ReLU-conv, two 3x3 (basic) or 1x1, 3x3, 1x1 (bottleneck, a quarter of the width inside).

    The stride sits on the first convolution. Without `preactivate` the first BN-ReLU is left out: its input has been
    through one already.

    Source: revnet-public `resnet_model.py`, `_residual` and `_bottleneck_residual`.
    """
    middle = out_width if layout == "basic" else out_width // 4
    kernels = (3, 3) if layout == "basic" else (1, 3, 1)
    widths = [width, *[middle] * (len(kernels) - 1), out_width]
    unit = nn.Sequential()
    for i, kernel in enumerate(kernels):
        if i > 0 or preactivate:
            unit.add_module(f"norm{i + 1}", batch_norm(widths[i], momentum))
        step = stride if i == 0 else 1
        unit.add_module(f"conv{i + 1}", nn.Conv2d(widths[i], widths[i + 1], kernel, step, kernel // 2, bias=False))
    return unit


@branches.register("conv_unit")
class ConvBranch(nn.Sequential):
    """Run one pre-activated unit at constant width and size.

    Shapes: (B, C, H, W) -> (B, C, H, W); for a bottleneck C is divisible by 4.
    Args:
        layout: `basic` or `bottleneck`.
        momentum: of BatchNorm's running statistics.
    Source: RevNet (Gomez et al. 2017), section 3.1, the residual functions F and G.
    """

    def __init__(self, at: BuildContext, *, layout: UnitLayout = "basic", momentum: UnitInterval = 0.01):
        at.require("image", "conv_unit")
        if layout == "bottleneck" and at.width % 4:
            raise PartArgumentError("layout", layout, f"basic, or a width divisible by 4 instead of {at.width}")
        unit = conv_unit(at.width, at.width, layout=layout, momentum=momentum)
        super().__init__(OrderedDict([*unit.named_children(), ("drop_path", DropPath(at.drop_path))]))
