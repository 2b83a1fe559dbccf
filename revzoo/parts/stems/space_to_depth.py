"""The stem of bijective i-RevNets: pixels become channels, and nothing is lost."""

from revzoo.bijection import SpaceToDepth
from revzoo.bounds import PositiveInt
from revzoo.parts.context import BuildContext, Shape
from revzoo.registry import stems


@stems.register("space_to_depth")
class SpaceToDepthStem(SpaceToDepth):
    """Fold squares of pixels into the channels; nothing is lost.

    Shapes: (B, C, H, W) -> (B, block^2 C, H / block, W / block).
    Args:
        block: side of a square [pixels]; divides the image's sides.
    Source: i-RevNet (Jacobsen et al. 2018): psi before the first block of the bijective network.
    """

    def __init__(self, context: BuildContext, *, block: PositiveInt = 2):
        super().__init__(block)
        context.require_kind("image", "space_to_depth")
        context.require_stride("block", block)
        width = block * block * context.shape.width
        self.out_shape = Shape(width, tuple(side // block for side in context.sides), "image")
