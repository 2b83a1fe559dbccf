"""The branch of RevNets: a pre-activated residual unit without its residual, which the coupling adds."""

from collections import OrderedDict

from torch import nn

from revzoo.bounds import UnitInterval
from revzoo.errors import PartArgumentError
from revzoo.parts.context import BuildContext
from revzoo.parts.layers.drop_path import DropPath
from revzoo.parts.layers.preactivated_unit import UnitLayout, build_preactivated_unit
from revzoo.registry import branches


@branches.register("conv_unit")
class ConvBranch(nn.Sequential):
    """Run one pre-activated residual unit at constant width and size.

    Shapes: (B, C, H, W) -> (B, C, H, W); for a bottleneck C is divisible by 4.
    Args:
        layout: `basic` has two 3x3 convolutions, `bottleneck` has 1x1, 3x3 and 1x1 with a quarter of the width inside.
        momentum: momentum of BatchNorm's running statistics.
    Source: RevNet (Gomez et al. 2017), section 3.1, the residual functions F and G.
    """

    def __init__(self, context: BuildContext, *, layout: UnitLayout = "basic", momentum: UnitInterval = 0.01):
        context.require_kind("image", "conv_unit")
        if layout == "bottleneck" and context.width % 4:
            raise PartArgumentError("layout", layout, f"basic, or a width divisible by 4 instead of {context.width}")
        unit = build_preactivated_unit(context.width, context.width, layout=layout, momentum=momentum)
        super().__init__(OrderedDict([*unit.named_children(), ("drop_path", DropPath(context.drop_path))]))
