"""The stem of RevNets: one convolution with BatchNorm and ReLU."""

from torch import Tensor, nn

from revzoo.bounds import PositiveInt, UnitInterval
from revzoo.errors import PartArgumentError
from revzoo.parts.context import BuildContext, Shape
from revzoo.parts.layers.norm import build_batch_norm
from revzoo.registry import stems


@stems.register("conv")
class ConvStem(nn.Module):
    """Convolve, normalise and apply ReLU; optionally max-pool to half the size.

    Shapes: (B, C, H, W) -> (B, width, H / stride, W / stride), halved again by `pool`.
    Args:
        width: number of channels.
        kernel: side of the kernel [pixels], odd.
        stride: stride of the convolution; the image's sides are divisible by it, or with `pool` by twice as much.
        pool: whether a 3x3 max-pool of stride 2 follows.
        momentum: momentum of BatchNorm's running statistics.
    Source: RevNet (revnet-public `resnet_model.py`); padding is symmetric here, TensorFlow's SAME is not at stride 2.
    """

    def __init__(
        self,
        context: BuildContext,
        *,
        width: PositiveInt,
        kernel: PositiveInt = 3,
        stride: PositiveInt = 1,
        pool: bool = False,
        momentum: UnitInterval = 0.01,
    ):
        super().__init__()
        shape = context.shape
        context.require_kind("image", "conv")
        if kernel % 2 == 0:
            raise PartArgumentError("kernel", kernel, "an odd number")
        shrink = stride * (2 if pool else 1)
        if any(side % shrink for side in shape.size):
            raise PartArgumentError("stride", stride, f"sides {shape.size} divisible by stride{' times 2' if pool else ''}")
        self.out_shape = Shape(width, tuple(side // shrink for side in shape.size), "image")
        self.conv = nn.Conv2d(shape.width, width, kernel, stride, kernel // 2, bias=False)
        self.norm = build_batch_norm(width, momentum)
        self.pool = nn.MaxPool2d(3, 2, 1) if pool else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        pooled: Tensor = self.pool(self.norm(self.conv(x)))
        return pooled
