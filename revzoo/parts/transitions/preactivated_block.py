"""The first block of a stage of a pre-activated ResNeXt, which changes width or size."""

from revzoo.bounds import PositiveFloat, PositiveInt
from revzoo.parts.context import BuildContext, Shape
from revzoo.parts.layers.norm import LeakyNorm
from revzoo.parts.layers.preactivated_block import PreactivatedBlock
from revzoo.parts.layers.resnet_unit import divide_rounding_up
from revzoo.registry import transitions


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
        super().__init__(context, "preactivated_block", middle, groups, norm, slope, stride)
        self.out_shape = Shape(context.width, divide_rounding_up(context.shape.size, stride), "image")
