"""The block of an ordinary ResNet as a branch, with timm's parameter names."""

import torch.nn.functional as F
from torch import Tensor

from revzoo.bounds import PositiveInt, UnitInterval
from revzoo.parts.context import BuildContext
from revzoo.parts.layers.preactivated_unit import UnitLayout
from revzoo.parts.layers.resnet_unit import ResNetUnit
from revzoo.registry import branches


@branches.register("residual_unit")
class ResidualUnit(ResNetUnit):
    """Run one block of an ordinary ResNet at constant width and size; norms and ReLUs follow the convolutions.

    f(x) = ReLU(unit(x) + x) is the block itself, for couplings that do not add x. Without `residual`, f(x) = ReLU(unit(x)).

    Shapes: (B, C, H, W) -> (B, C, H, W).
    Args:
        layout: `basic` has two 3x3 convolutions, `bottleneck` has 1x1, 3x3 and 1x1.
        residual: whether f contains the block's own residual.
        middle: channels inside; null means the width, or a quarter of it in a bottleneck.
        groups: groups of a bottleneck's 3x3 convolution (ResNeXt).
        momentum: momentum of BatchNorm's running statistics.
    Source: ResNet (He et al. 2016), timm `resnet.py`; without residual Re2TAL's F (Zhao et al. 2023; OpenTAD
        `re2tal_slowfast.py`), which has the ReLU inside.
    """

    def __init__(
        self,
        context: BuildContext,
        *,
        layout: UnitLayout = "basic",
        residual: bool = True,
        middle: PositiveInt | None = None,
        groups: PositiveInt = 1,
        momentum: UnitInterval = 0.1,
    ):
        super().__init__(context, "residual_unit", layout, middle, groups, momentum)
        self._residual = residual

    def forward(self, x: Tensor) -> Tensor:
        change = self.compute_change(x)
        return F.relu(change + x if self._residual else change)
