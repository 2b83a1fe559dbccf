"""The branch of RevNeXt and of the layer-wise network: layers that are inverted one by one."""

from collections import OrderedDict

from torch import nn

from revzoo.bounds import NonNegativeFloat, PositiveFloat, PositiveInt
from revzoo.errors import PartArgumentError
from revzoo.parts.context import BuildContext
from revzoo.parts.layers.drop_path import DropPath
from revzoo.parts.layers.invertible_unit import list_unit_layers
from revzoo.registry import branches


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
        self,
        context: BuildContext,
        *,
        units: PositiveInt = 1,
        slope: PositiveFloat = 0.2,
        eps_i: NonNegativeFloat = 0.1,
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
