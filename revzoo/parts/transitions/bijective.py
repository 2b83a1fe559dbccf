"""Transitions that lose nothing: pixels become channels."""

from revzoo.bijection import PixelUnshuffle, SpaceToDepth
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


@transitions.register("pixel_unshuffle")
class PixelUnshuffleTransition(PixelUnshuffle):
    """Fold squares of pixels into channels next to the one they come from. Nothing is lost, and nothing is stored for backward.

    Use it in networks of one tensor whose layers are inverted one by one; it needs half as much memory as `space_to_depth`.

    Shapes: x: (B, C, H, W) -> (B, block^2 C, H / block, W / block), for each stream.
    Args:
        block: side of a square [pixels]; divides the sides.
    Source: channel pooling of Hascoet et al. 2023, section 4.2.4.
    """

    def __init__(self, context: BuildContext, *, block: PositiveInt = 2):
        super().__init__(block)
        self.out_shape = fold_shape(context, "pixel_unshuffle", block)
