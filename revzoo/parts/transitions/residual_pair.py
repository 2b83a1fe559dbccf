"""The transition of RevNets: an ordinary two-stream residual unit, whose activations are stored."""

from torch import Tensor, nn

from revzoo.bounds import PositiveInt, UnitInterval
from revzoo.errors import PartArgumentError
from revzoo.parts.context import BuildContext, Shape
from revzoo.parts.layers.preactivated_unit import UnitLayout, build_preactivated_unit, build_shortcut
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
            width, out_width, layout=layout, stride=stride, preactivate=preactivate, momentum=momentum
        )
        self.g = build_preactivated_unit(out_width, out_width, layout=layout, momentum=momentum)
        self.shortcut1 = build_shortcut(width, out_width, stride, layout)
        self.shortcut2 = build_shortcut(width, out_width, stride, layout)

    def forward(self, x1: Tensor, x2: Tensor) -> tuple[Tensor, Tensor]:
        y1 = self.shortcut1(x1) + self.f(x2)
        y2 = self.shortcut2(x2) + self.g(y1)
        return y1, y2
