"""The bijective transition that leaves the channels of a pixel side by side, so that halves of them stay apart."""

from revzoo.bijection import PixelUnshuffle
from revzoo.bounds import PositiveInt
from revzoo.parts.context import BuildContext
from revzoo.parts.transitions.space_to_depth import fold_shape
from revzoo.registry import transitions


@transitions.register("pixel_unshuffle")
class PixelUnshuffleTransition(PixelUnshuffle):
    """Fold squares of pixels into channels beside the one they come from. Nothing is lost, and nothing is stored for backward.

    Use it in networks of one tensor whose layers are inverted one by one; it needs half as much memory as `space_to_depth`.

    Shapes: x: (B, C, H, W) -> (B, block^2 C, H / block, W / block), for each stream.
    Args:
        block: side of a square [pixels]; divides the sides.
    Source: channel pooling of Hascoet et al. 2023, section 4.2.4.
    """

    def __init__(self, context: BuildContext, *, block: PositiveInt = 2):
        super().__init__(block)
        self.out_shape = fold_shape(context, "pixel_unshuffle", block)
