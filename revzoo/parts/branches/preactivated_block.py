"""The block of a pre-activated ResNeXt at constant width and size."""

from revzoo.bounds import PositiveFloat, PositiveInt
from revzoo.parts.context import BuildContext
from revzoo.parts.layers.norm import LeakyNorm
from revzoo.parts.layers.preactivated_block import PreactivatedBlock
from revzoo.registry import branches


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

    def __init__(
        self,
        context: BuildContext,
        *,
        middle: PositiveInt | None = None,
        groups: PositiveInt = 1,
        norm: LeakyNorm = "in_place_abn",
        slope: PositiveFloat = 0.01,
    ):
        super().__init__(context, "preactivated_block", middle, groups, norm, slope)
