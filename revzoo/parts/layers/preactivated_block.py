"""The block of a pre-activated ResNeXt, its shortcut included."""

from torch import Tensor, nn

from revzoo.errors import PartArgumentError
from revzoo.parts.context import BuildContext
from revzoo.parts.layers.drop_path import DropPath
from revzoo.parts.layers.norm import LeakyNorm, build_leaky_norm


class PreactivatedBlock(nn.Module):
    """Return x + unit(norm(x)), or, where width or size change, a 1x1 convolution of norm(x) in place of x.

    The unit convolves 1x1, 3x3 and 1x1, with norms between. Each norm is followed by leaky ReLU.

    Args:
        part: registered name of the part, for messages.
        middle: channels inside; None means half of the width.
        groups: groups of the 3x3 convolution.
        norm: `in_place_abn` keeps the activation's output alone, `leaky_batch_norm` its own input too.
        slope: of leaky ReLU's negative side.
        stride: of the first 1x1 convolution.
    """

    def __init__(
        self,
        context: BuildContext,
        part: str,
        middle: int | None,
        groups: int,
        norm: LeakyNorm,
        slope: float,
        stride: int = 1,
    ):
        super().__init__()
        context.require_kind("image", part)
        width, out_width = context.shape.width, context.width
        middle = middle or max(out_width // 2, 1)
        if middle % groups:
            raise PartArgumentError("groups", groups, f"a divisor of the {middle} channels inside")
        self.bn1 = build_leaky_norm(norm, width, slope)
        self.conv1 = nn.Conv2d(width, middle, 1, stride, bias=False)
        self.bn2 = build_leaky_norm(norm, middle, slope)
        self.conv2 = nn.Conv2d(middle, middle, 3, padding=1, groups=groups, bias=False)
        self.bn3 = build_leaky_norm(norm, middle, slope)
        self.conv3 = nn.Conv2d(middle, out_width, 1, bias=False)
        is_same = stride == 1 and width == out_width
        self.proj_conv = None if is_same else nn.Conv2d(width, out_width, 1, stride, bias=False)
        self.drop_path = DropPath(context.drop_path)

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn1(x)
        shortcut = x if self.proj_conv is None else self.proj_conv(y)
        del x
        y = self.conv1(y)
        y = self.conv2(self.bn2(y))
        y = self.conv3(self.bn3(y))
        out: Tensor = shortcut + self.drop_path(y)
        return out
