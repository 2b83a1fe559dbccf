"""The convolutions of an ordinary ResNet block, with timm's parameter names."""

import torch.nn.functional as F
from torch import Tensor, nn

from revzoo.errors import PartArgumentError
from revzoo.parts.context import BuildContext
from revzoo.parts.layers.drop_path import DropPath
from revzoo.parts.layers.preactivated_unit import UnitLayout


class ResNetUnit(nn.Module):
    """Convolutions, each with BatchNorm (eps 1e-5) and all but the last with ReLU: what a block adds to its shortcut.

    Args:
        part: registered name of the part, for messages.
        layout: `basic` has two 3x3 convolutions, `bottleneck` has 1x1, 3x3 and 1x1.
        middle: channels inside; None means the width, or a quarter of it in a bottleneck.
        groups: groups of a bottleneck's 3x3 convolution.
        momentum: momentum of BatchNorm's running statistics.
        stride: stride of the first 3x3 convolution, which is a bottleneck's second convolution ("v1.5").
    """

    def __init__(
        self,
        context: BuildContext,
        part: str,
        layout: UnitLayout,
        middle: int | None,
        groups: int,
        momentum: float,
        stride: int = 1,
    ):
        super().__init__()
        context.require_kind("image", part)
        inside = middle or (context.width if layout == "basic" else max(context.width // 4, 1))
        if inside % groups:
            raise PartArgumentError("groups", groups, f"a divisor of the {inside} channels inside")
        if layout == "basic" and groups != 1:
            raise PartArgumentError("groups", groups, "1, or the layout bottleneck")
        kernels, strided = ((3, 3), 0) if layout == "basic" else ((1, 3, 1), 1)
        widths = [context.shape.width, *[inside] * (len(kernels) - 1), context.width]
        self._depth = len(kernels)
        for i, kernel in enumerate(kernels):
            conv_stride, conv_groups = (stride, groups) if i == strided else (1, 1)
            conv = nn.Conv2d(widths[i], widths[i + 1], kernel, conv_stride, kernel // 2, groups=conv_groups, bias=False)
            self.add_module(f"conv{i + 1}", conv)
            self.add_module(f"bn{i + 1}", nn.BatchNorm2d(widths[i + 1], momentum=momentum))
        self.drop_path = DropPath(context.drop_path)

    def compute_change(self, x: Tensor) -> Tensor:
        """Return what the block adds to its shortcut."""
        for i in range(1, self._depth + 1):
            x = getattr(self, f"bn{i}")(getattr(self, f"conv{i}")(x))
            x = F.relu(x) if i < self._depth else x
        dropped: Tensor = self.drop_path(x)
        return dropped


def divide_rounding_up(size: tuple[int, ...], stride: int) -> tuple[int, ...]:
    """Return the sides of an image after a padded convolution or pooling of this stride."""
    return tuple(-(-side // stride) for side in size)
