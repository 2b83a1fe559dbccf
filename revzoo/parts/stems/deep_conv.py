"""The stem of the ResNeXts with in-place ABN."""

from torch import Tensor, nn

from revzoo.bounds import PositiveFloat, PositiveInt
from revzoo.parts.context import BuildContext, Shape
from revzoo.parts.layers.norm import LeakyNorm, build_leaky_norm
from revzoo.parts.layers.resnet_unit import divide_rounding_up
from revzoo.registry import stems


@stems.register("deep_conv")
class DeepConvStem(nn.Module):
    """Convolve 3x3 three times, with norm and leaky ReLU between, and perhaps max-pool.

    The blocks after it begin with a norm, so the last convolution has none.

    Shapes: (B, C, H, W) -> (B, width, H / s, W / s), where each halving rounds up; s is `stride`, or twice that with `pool`.
    Args:
        width: number of channels.
        stride: of the first convolution.
        pool: whether 3x3 pixels are max-pooled with stride 2.
        norm: `in_place_abn` keeps the activation's output alone, `leaky_batch_norm` its own input too, for the same
            function.
        slope: of leaky ReLU's negative side.
    Source: Rota Bulo et al. 2018; mapillary/inplace_abn `scripts/models/resnext.py`, mod1 with input_3x3.
    """

    def __init__(
        self,
        context: BuildContext,
        *,
        width: PositiveInt = 64,
        stride: PositiveInt = 2,
        pool: bool = True,
        norm: LeakyNorm = "in_place_abn",
        slope: PositiveFloat = 0.01,
    ):
        super().__init__()
        context.require_kind("image", "deep_conv")
        size = divide_rounding_up(context.shape.size, stride)
        self.out_shape = Shape(width, divide_rounding_up(size, 2) if pool else size, "image")
        self.conv1 = nn.Conv2d(context.shape.width, width, 3, stride, 1, bias=False)
        self.bn1 = build_leaky_norm(norm, width, slope)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = build_leaky_norm(norm, width, slope)
        self.conv3 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.pool = nn.MaxPool2d(3, 2, 1) if pool else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv1(x)
        x = self.conv2(self.bn1(x))
        x = self.conv3(self.bn2(x))
        x = self.pool(x)
        return x
