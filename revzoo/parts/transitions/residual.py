"""Transitions of convolutional networks: residual blocks that change width or size."""

import torch.nn.functional as F
from torch import Tensor, nn

from revzoo.bounds import PositiveFloat, PositiveInt, UnitInterval
from revzoo.errors import PartArgumentError
from revzoo.parts.context import BuildContext, Shape
from revzoo.parts.layers.convolution import (
    LeakyNorm,
    Padding,
    PreactivatedBlock,
    ResNetUnit,
    UnitLayout,
    build_preactivated_unit,
    build_shortcut,
    divide_rounding_up,
)
from revzoo.parts.layers.join import Join, join_streams
from revzoo.registry import transitions


@transitions.register("residual_pair")
class ResidualPair(nn.Module):
    """Run a residual unit of two streams whose shortcuts change size and width, so it has no inverse.

    y1 = shortcut(x1) + F(x2);  y2 = shortcut(x2) + G(y1).

    Shapes: x1, x2: (B, C, H, W) -> (B, width, H / stride, W / stride).
    Args:
        stride: stride of F and of both shortcuts; divides the sides.
        layout: layout of F and G. With `basic` a shortcut pools and pads with zero channels, with `bottleneck` it is a 1x1
            convolution.
        preactivate: whether F begins with BatchNorm and ReLU. Use false directly after a stem, which ends with both.
        momentum: momentum of BatchNorm's running statistics.
        padding: `symmetric`, or `same` as TensorFlow pads where the stride is not 1, for published checkpoints.
    Source: RevNet, the first unit of each stage (revnet-public `revnet_model.py`). The shortcuts follow `resnet_model.py`:
        average pooling, symmetric zero channels, projections without norm.
    """

    def __init__(
        self,
        context: BuildContext,
        *,
        stride: PositiveInt = 1,
        layout: UnitLayout = "basic",
        preactivate: bool = True,
        momentum: UnitInterval = 0.01,
        padding: Padding = "symmetric",
    ):
        super().__init__()
        width, out_width = context.shape.width, context.width
        context.require_kind("image", "residual_pair")
        context.require_stride("stride", stride)
        if layout == "bottleneck" and out_width % 4:
            raise PartArgumentError("layout", layout, f"basic, or a width divisible by 4 instead of {out_width}")
        if layout == "basic" and (out_width < width or (out_width - width) % 2):
            raise PartArgumentError(
                "layout", layout, f"bottleneck, or a width of {width} plus an even number instead of {out_width}"
            )
        self.out_shape = Shape(out_width, tuple(side // stride for side in context.shape.size), "image")
        self.f = build_preactivated_unit(
            width, out_width, layout=layout, stride=stride, preactivate=preactivate, momentum=momentum, padding=padding
        )
        self.g = build_preactivated_unit(out_width, out_width, layout=layout, momentum=momentum)
        self.shortcut1 = build_shortcut(width, out_width, stride, layout)
        self.shortcut2 = build_shortcut(width, out_width, stride, layout)

    def forward(self, x1: Tensor, x2: Tensor) -> tuple[Tensor, Tensor]:
        y1 = self.shortcut1(x1) + self.f(x2)
        y2 = self.shortcut2(x2) + self.g(y1)
        return y1, y2


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

    _part = "residual_block"  # for messages

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
        super().__init__(context, self._part, layout, middle, groups, momentum, stride)
        self._fuse = fuse
        self.out_shape = Shape(context.width, divide_rounding_up(context.shape.size, stride), "image")
        projection = nn.Conv2d(context.shape.width, context.width, 1, stride, bias=False)
        self.downsample = nn.Sequential(projection, nn.BatchNorm2d(context.width, momentum=momentum))

    def forward(self, x1: Tensor, x2: Tensor) -> tuple[Tensor, Tensor]:
        y = self._shrink(join_streams(x1, x2, self._fuse))
        return y, y

    def _shrink(self, x: Tensor) -> Tensor:
        return F.relu(self.compute_change(x) + self.downsample(x))


@transitions.register("downsampling_block")
class DownsamplingBlock(ResidualBlock):
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
    _part = "downsampling_block"

    def __init__(
        self, context: BuildContext, *, layout: UnitLayout = "basic", stride: PositiveInt = 2, momentum: UnitInterval = 0.1
    ):
        super().__init__(context, layout=layout, stride=stride, momentum=momentum)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]  # one tensor
        return self._shrink(x)


@transitions.register("preactivated_block")
class PreactivatedBlockTransition(PreactivatedBlock):
    """Change width or size of the one tensor of an ordinary network; the shortcut is a 1x1 convolution.

    Shapes: (B, C, H, W) -> (B, width, H / stride, W / stride), rounded up.
    Args:
        middle: channels inside; null means half of the width.
        groups: groups of the 3x3 convolution.
        norm: `in_place_abn` keeps the activation's output alone, `leaky_batch_norm` its own input too, for the same
            function.
        slope: of leaky ReLU's negative side.
        stride: stride of the first 1x1 convolution and of the shortcut.
    Source: Rota Bulo et al. 2018; mapillary/inplace_abn `modules/residual.py`, IdentityResidualBlock.
    """

    takes_one_tensor = True

    def __init__(
        self,
        context: BuildContext,
        *,
        middle: PositiveInt | None = None,
        groups: PositiveInt = 1,
        norm: LeakyNorm = "in_place_abn",
        slope: PositiveFloat = 0.01,
        stride: PositiveInt = 1,
    ):
        super().__init__(context, stride, middle=middle, groups=groups, norm=norm, slope=slope)
        self.out_shape = Shape(context.width, divide_rounding_up(context.shape.size, stride), "image")
