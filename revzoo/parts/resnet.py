"""The parts of ordinary ResNets, with timm's parameter names: their stem, their blocks as steps, and as transitions."""

from typing import Literal

import torch.nn.functional as F
from timm.layers import DropPath
from torch import Tensor, nn

from revzoo.bounds import PositiveInt, UnitInterval
from revzoo.errors import PartArgumentError
from revzoo.parts.context import BuildContext, Shape, joined
from revzoo.parts.conv import UnitLayout
from revzoo.registry import branches, stems, transitions


@stems.register("resnet")
class ResNetStem(nn.Module):
    """Convolve 7x7 pixels, normalise, rectify and max-pool: a quarter of the height and of the width.

    Shapes: (B, C, H, W) -> (B, width, H / 4, W / 4), each halving rounded up.
    Args:
        width: channels.
        momentum: of BatchNorm's running statistics.
    Source: ResNet (He et al. 2016), table 1; timm `resnet.py`. BatchNorm's eps is 1e-5.
    """

    def __init__(self, at: BuildContext, *, width: PositiveInt = 64, momentum: UnitInterval = 0.1):
        super().__init__()
        at.require("image", "resnet", "an input of kind image, or token_embed for texts")
        self.out_shape = Shape(width, _shrunk(_shrunk(at.shape.size, 2), 2), "image")
        self.conv1 = nn.Conv2d(at.shape.width, width, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(width, momentum=momentum)

    def forward(self, x: Tensor) -> Tensor:
        return F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 3, 2, 1)


class _Unit(nn.Module):
    """Convolutions, each with BatchNorm (eps 1e-5) and all but the last with ReLU: what a block adds to its shortcut.

    The stride is on the first 3x3 convolution (for a bottleneck the second convolution, "v1.5").
    """

    def __init__(
        self,
        at: BuildContext,
        part: str,
        layout: UnitLayout,
        middle: int | None,
        groups: int,
        momentum: float,
        stride: int = 1,
    ):
        super().__init__()
        at.require("image", part)
        inside = middle or (at.width if layout == "basic" else max(at.width // 4, 1))
        if inside % groups:
            raise PartArgumentError("groups", groups, f"a divisor of the {inside} channels inside")
        kernels, striding = ((3, 3), 0) if layout == "basic" else ((1, 3, 1), 1)
        if layout == "basic" and groups != 1:
            raise PartArgumentError("groups", groups, "1, or the layout bottleneck")
        widths = [at.shape.width, *[inside] * (len(kernels) - 1), at.width]
        self._count = len(kernels)
        for i, kernel in enumerate(kernels):
            step, shares = (stride, groups) if i == striding else (1, 1)
            conv = nn.Conv2d(widths[i], widths[i + 1], kernel, step, kernel // 2, groups=shares, bias=False)
            self.add_module(f"conv{i + 1}", conv)
            self.add_module(f"bn{i + 1}", nn.BatchNorm2d(widths[i + 1], momentum=momentum))
        self.drop_path = DropPath(at.drop_path)

    def change(self, x: Tensor) -> Tensor:
        """Return what is added to the shortcut."""
        for i in range(1, self._count + 1):
            x = getattr(self, f"bn{i}")(getattr(self, f"conv{i}")(x))
            x = F.relu(x) if i < self._count else x
        dropped: Tensor = self.drop_path(x)
        return dropped


@branches.register("residual_unit")
class ResidualUnit(_Unit):
    """Run one block of an ordinary ResNet at constant width and size, normed and rectified behind.

    residual: f(x) = ReLU(unit(x) + x), the block itself, for couplings that do not add x; else f(x) = ReLU(unit(x)).

    Shapes: (B, C, H, W) -> (B, C, H, W).
    Args:
        layout: `basic` or `bottleneck`.
        residual: whether f contains the block's own residual.
        middle: channels inside; null is the width, a quarter of it in a bottleneck.
        groups: of a bottleneck's 3x3 convolution (ResNeXt).
        momentum: of BatchNorm's running statistics.
    Source: ResNet (He et al. 2016), timm `resnet.py`; without residual Re2TAL's F (Zhao et al. 2023; OpenTAD
        `re2tal_slowfast.py`), which has the ReLU inside.
    """

    def __init__(
        self,
        at: BuildContext,
        *,
        layout: UnitLayout = "basic",
        residual: bool = True,
        middle: PositiveInt | None = None,
        groups: PositiveInt = 1,
        momentum: UnitInterval = 0.1,
    ):
        super().__init__(at, "residual_unit", layout, middle, groups, momentum)
        self._residual = residual

    def forward(self, x: Tensor) -> Tensor:
        change = self.change(x)
        return F.relu(change + x if self._residual else change)


@transitions.register("residual_block")
class ResidualBlock(_Unit):
    """Fuse the streams, run an ordinary ResNet block that changes width or size, and hand its output to both streams.

    x = fuse(x1, x2);  y1 = y2 = ReLU(unit(x) + downsample(x)), downsample being a 1x1 convolution and BatchNorm.

    Shapes: x1, x2: (B, C, H, W) -> (B, width, H / stride, W / stride), rounded up.
    Args:
        layout: `basic` or `bottleneck`.
        stride: of the first 3x3 convolution and of the shortcut.
        fuse: `mean` of the streams, or `last`, the newer one, x2, alone.
        middle: channels inside; null is the width, a quarter of it in a bottleneck.
        groups: of a bottleneck's 3x3 convolution (ResNeXt).
        momentum: of BatchNorm's running statistics.
    Source: ResNet (He et al. 2016), the first block of a layer, timm `resnet.py`; ordinary in Re2TAL (Zhao et al. 2023) too.
    """

    def __init__(
        self,
        at: BuildContext,
        *,
        layout: UnitLayout = "basic",
        stride: PositiveInt = 1,
        fuse: Literal["mean", "last"] = "mean",
        middle: PositiveInt | None = None,
        groups: PositiveInt = 1,
        momentum: UnitInterval = 0.1,
    ):
        super().__init__(at, "residual_block", layout, middle, groups, momentum, stride)
        self._fuse = fuse
        self.out_shape = Shape(at.width, _shrunk(at.shape.size, stride), "image")
        projection = nn.Conv2d(at.shape.width, at.width, 1, stride, bias=False)
        self.downsample = nn.Sequential(projection, nn.BatchNorm2d(at.width, momentum=momentum))

    def forward(self, x1: Tensor, x2: Tensor) -> tuple[Tensor, Tensor]:
        x = joined(x1, x2, self._fuse)
        y = F.relu(self.change(x) + self.downsample(x))
        return y, y


def _shrunk(size: tuple[int, ...], stride: int) -> tuple[int, ...]:
    return tuple(-(-side // stride) for side in size)
