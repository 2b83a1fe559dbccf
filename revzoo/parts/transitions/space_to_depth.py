"""The bijective transition: it moves pixels into channels, stores nothing and is undone in backward."""

from revzoo.bijection import SpaceToDepth
from revzoo.bounds import PositiveInt
from revzoo.errors import PartArgumentError
from revzoo.parts.context import BuildContext, Shape
from revzoo.registry import transitions


@transitions.register("space_to_depth")
class SpaceToDepthTransition(SpaceToDepth):
    """Fold squares of pixels into the channels of each stream. Nothing is lost, and nothing is stored for backward.

    Shapes: x: (B, C, H, W) -> (B, block^2 C, H / block, W / block), for both streams.
    Args:
        block: side of a square [pixels]; divides the sides.
    Source: i-RevNet (Jacobsen et al. 2018), psi.
    """

    def __init__(self, context: BuildContext, *, block: PositiveInt = 2):
        super().__init__(block)
        self.out_shape = fold_shape(context, "space_to_depth", block)


def fold_shape(context: BuildContext, part: str, block: int) -> Shape:
    """Return the shape when squares of pixels have been folded into the channels.

    Raises:
        PartArgumentError: no images, sides that cannot be divided, or a stage of another width.
    """
    shape = context.shape
    context.require_kind("image", part)
    context.require_stride("block", block)
    width = block * block * shape.width
    if context.width != width:
        raise PartArgumentError("type", part, f"a stage of width {width} (block^2 times {shape.width})")
    return Shape(width, tuple(side // block for side in shape.size), "image")
