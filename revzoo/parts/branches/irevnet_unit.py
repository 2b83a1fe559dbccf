"""The branch of i-RevNets. It receives the stream after space_to_depth and works on the stream as it was before."""

from collections import OrderedDict

from timm.layers import BatchNormAct2d
from torch import Tensor, nn

from revzoo.bijection import SpaceToDepth
from revzoo.bounds import PositiveInt, Rate, UnitInterval
from revzoo.errors import PartArgumentError
from revzoo.parts.context import BuildContext
from revzoo.parts.layers.drop_path import DropPath
from revzoo.registry import branches


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
