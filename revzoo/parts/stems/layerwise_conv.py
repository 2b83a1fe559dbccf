"""The stem of RevNeXt and of the layer-wise network: one convolution, and a norm and activation that are inverted."""

from collections import OrderedDict

from torch import nn

from revzoo.bounds import NonNegativeFloat, PositiveFloat, PositiveInt
from revzoo.parts.context import BuildContext, Shape
from revzoo.parts.layers.invertible_unit import list_norm_and_activation
from revzoo.registry import stems


@stems.register("layerwise_conv")
class LayerwiseConv(nn.Sequential):
    """Convolve 3x3 at full size; then an invertible BatchNorm and LeakyReLU.

    The convolution has no inverse, and stores the image. The other two are layers of the network with modes of their own.

    Shapes: (B, C, H, W) -> (B, width, H, W).
    Args:
        width: number of channels.
        slope: of the LeakyReLU's negative side.
        eps_i: floor under the scale of BatchNorm. With 0, a weight that becomes 0 cannot be inverted.
    Source: Hascoet et al. 2023; TristHas/reversibility_paper, `models.py`, the prep block.
    """

    def __init__(self, context: BuildContext, *, width: PositiveInt, slope: PositiveFloat = 0.2, eps_i: NonNegativeFloat = 0.1):
        context.require_kind("image", "layerwise_conv")
        conv = nn.Conv2d(context.shape.width, width, 3, padding=1, bias=False)
        super().__init__(OrderedDict([("conv", conv), *list_norm_and_activation(width, slope, eps_i)]))
        self.out_shape = Shape(width, context.shape.size, "image")
