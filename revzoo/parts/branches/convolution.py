"""Branches of convolutional networks."""

from collections import OrderedDict

import torch.nn.functional as F
from timm.layers import BatchNormAct2d
from torch import Tensor, nn

from revzoo.bijection import SpaceToDepth
from revzoo.bounds import NonNegativeFloat, PositiveFloat, PositiveInt, Rate, UnitInterval
from revzoo.errors import PartArgumentError
from revzoo.parts.context import BuildContext
from revzoo.parts.layers.convolution import PreactivatedBlock, ResNetUnit, UnitLayout, build_preactivated_unit, list_unit_layers
from revzoo.parts.layers.drop_path import DropPath
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


@branches.register("irevnet_unit")
class IRevNetUnit(nn.Sequential):
    """Run three pre-activated convolutions, with fewer channels in the middle.

    In the paper, the first unit of a stage sees x2 before psi (space_to_depth) and reaches psi's size with a stride. Here psi
    is the transition before the stage. So that unit undoes psi first, and takes psi's block as its stride: the same
    function of the same pixels.

    Shapes: (B, C, H, W) -> (B, C, H, W), C divisible by `bottleneck`.
    Args:
        kernels: sides of the three kernels [pixels], odd.
        bottleneck: C divided by the number of channels in the middle.
        preactivate_first: whether the first unit of the stage begins with BatchNorm and ReLU; that of the network does not.
        dropout: probability of dropping a value after the second convolution, in [0, 1).
        momentum: momentum of BatchNorm's running statistics.
    Source: i-RevNet (Jacobsen et al. 2018); pytorch-i-revnet `models/iRevNet.py`, irevnet_block.
    """

    def __init__(
        self,
        context: BuildContext,
        *,
        kernels: tuple[PositiveInt, PositiveInt, PositiveInt] = (3, 3, 3),
        bottleneck: PositiveInt = 4,
        preactivate_first: bool = True,
        dropout: Rate = 0.0,
        momentum: UnitInterval = 0.1,
    ):
        width, folded = context.width, context.folded
        context.require_kind("image", "irevnet_unit")
        if any(kernel % 2 == 0 for kernel in kernels):
            raise PartArgumentError("kernels", list(kernels), "odd numbers")
        context.require_divisor("bottleneck", bottleneck)
        stride = 1 if folded is None else folded.block
        middle = width // bottleneck
        widths = (width // stride**2, middle, middle, width)
        strides = (stride, 1, 1)
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        if folded is not None:
            layers["unfold"] = _Unfold(stride)
        for i, kernel in enumerate(kernels):
            if i > 0 or preactivate_first or context.index > 0:
                layers[f"norm{i + 1}"] = BatchNormAct2d(widths[i], momentum=momentum)
            layers[f"conv{i + 1}"] = nn.Conv2d(widths[i], widths[i + 1], kernel, strides[i], kernel // 2, bias=False)
            if i == 1:
                layers["dropout"] = nn.Dropout(dropout)
        layers["drop_path"] = DropPath(context.drop_path)
        super().__init__(layers)


class _Unfold(nn.Module):
    """Undo `SpaceToDepth(block)`."""

    def __init__(self, block: int):
        super().__init__()
        self._fold = SpaceToDepth(block)

    def forward(self, x: Tensor) -> Tensor:
        return self._fold.inverse(x)


@branches.register("layerwise_unit")
class LayerwiseUnit(nn.Sequential):
    """Run units of a coupled 3x3 convolution, an invertible BatchNorm and an invertible LeakyReLU.

    In a step of two coupled streams (RevNeXt), the layers are walked back once the step has been inverted. Without a coupling
    (the layer-wise network), they are layers of the network.

    Shapes: (B, C, H, W) -> (B, C, H, W), C even.
    Args:
        units: how many follow one another.
        slope: of the LeakyReLU's negative side.
        eps_i: floor under the scale of BatchNorm. With 0, a weight that becomes 0 cannot be inverted.
    Source: Hascoet et al. 2023, sections 4.3 and 4.4; TristHas/reversibility_paper, `models.py`.
    """

    def __init__(
        self, context: BuildContext, *, units: PositiveInt = 1, slope: PositiveFloat = 0.2, eps_i: NonNegativeFloat = 0.1
    ):
        context.require_kind("image", "layerwise_unit")
        if context.width % 2:
            allowed = f"a stage of even width, because each half of the channels is convolved; the width is {context.width}"
            raise PartArgumentError("type", "layerwise_unit", allowed)
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        for i in range(1, units + 1):
            layers.update({f"{name}{i}": layer for name, layer in list_unit_layers(context.width, slope, eps_i)})
        if context.drop_path:
            layers["drop_path"] = DropPath(context.drop_path)
        super().__init__(layers)


@branches.register("preactivated_block")
class PreactivatedBlockBranch(PreactivatedBlock):
    """Return x + unit(x), the block of an ordinary network (`coupling: none`).

    The unit is norm, 1x1 convolution, norm, 3x3 convolution, norm, 1x1 convolution. Each norm is followed by leaky ReLU.

    Shapes: (B, C, H, W) -> (B, C, H, W).
    Args:
        middle: channels inside; null means half of the width.
        groups: groups of the 3x3 convolution.
        norm: `in_place_abn` keeps the activation's output alone, `leaky_batch_norm` its own input too, for the same
            function.
        slope: of leaky ReLU's negative side.
    Source: Rota Bulo et al. 2018; mapillary/inplace_abn `modules/residual.py`, IdentityResidualBlock.
    """

    has_shortcut = True
