"""Stems of convolutional networks: convolutions, or pixels folded into channels."""

from collections import OrderedDict
from dataclasses import replace
from typing import Literal

import torch
import torch.nn.functional as F
from timm.layers.pool2d_same import MaxPool2dSame
from torch import Tensor, nn

from revzoo.bijection import SpaceToDepth
from revzoo.bounds import NonNegativeFloat, PositiveFloat, PositiveInt, UnitInterval
from revzoo.errors import PartArgumentError
from revzoo.parts.context import BuildContext, Shape
from revzoo.parts.layers.convolution import (
    LeakyNorm,
    Padding,
    build_batch_norm,
    build_convolution,
    build_leaky_norm,
    divide_rounding_up,
    list_norm_and_activation,
)
from revzoo.registry import stems

Zeros = Literal["halves", "end"]


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
        padding: `symmetric`, or `same` as TensorFlow pads where the stride is not 1, for published checkpoints.
    Source: RevNet (revnet-public `resnet_model.py`), whose padding is `same`.
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
        padding: Padding = "symmetric",
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
        self.conv = build_convolution(shape.width, width, kernel, stride, padding)
        self.norm = build_batch_norm(width, momentum)
        self.pool = nn.Identity() if not pool else MaxPool2dSame(3, 2) if padding == "same" else nn.MaxPool2d(3, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.pool(self.norm(self.conv(x)))


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


@stems.register("resnet")
class ResNetStem(nn.Module):
    """Convolve 7x7 pixels, normalise, apply ReLU and max-pool: a quarter of the height and of the width.

    Shapes: (B, C, H, W) -> (B, width, H / 4, W / 4), where each of the two halvings rounds up.
    Args:
        width: number of channels.
        momentum: momentum of BatchNorm's running statistics.
    Source: ResNet (He et al. 2016), table 1; timm `resnet.py`. BatchNorm's eps is 1e-5.
    """

    def __init__(self, context: BuildContext, *, width: PositiveInt = 64, momentum: UnitInterval = 0.1):
        super().__init__()
        context.require_kind("image", "resnet")
        shape = context.shape
        self.out_shape = Shape(width, divide_rounding_up(divide_rounding_up(shape.size, 2), 2), "image")
        self.conv1 = nn.Conv2d(shape.width, width, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(width, momentum=momentum)

    def forward(self, x: Tensor) -> Tensor:
        return F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 3, 2, 1)


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


@stems.register("space_to_depth")
class SpaceToDepthStem(SpaceToDepth):
    """Fold squares of pixels into the channels; nothing is lost.

    Shapes: (B, C, H, W) -> (B, block^2 C, H / block, W / block).
    Args:
        block: side of a square [pixels]; divides the image's sides.
    Source: i-RevNet (Jacobsen et al. 2018): psi before the first block of the bijective network.
    """

    def __init__(self, context: BuildContext, *, block: PositiveInt = 2):
        super().__init__(block)
        context.require_kind("image", "space_to_depth")
        context.require_stride("block", block)
        width = block * block * context.shape.width
        self.out_shape = Shape(width, tuple(side // block for side in context.sides), "image")


@stems.register("pad_channels")
class PadStem(nn.Module):
    """Append channels of zeros to each half of the channels, so that a network can be wider than its input.

    After a channel split, both streams then contain part of the image. A stream of nothing but zeros cannot be
    reconstructed without exact=True: BatchNorm would divide the rounding errors in it by their own standard deviation.

    Shapes: (B, C, H, W) -> (B, width, H / block, W / block).
    Args:
        width: channels after padding, even, at least block^2 C.
        block: side of the squares of pixels [pixels] that are folded into channels before padding; divides the image's sides.
        zeros: `halves`, or `end` for all zeros behind the image, as in checkpoints of pytorch-i-revnet.
    Source: i-RevNet (Jacobsen et al. 2018), the injective network; pytorch-i-revnet (`models/model_utils.py`, injective_pad).
    """

    def __init__(self, context: BuildContext, *, width: PositiveInt, block: PositiveInt = 1, zeros: Zeros = "halves"):
        super().__init__()
        self._fold = SpaceToDepthStem(context, block=block)
        channels = self._fold.out_shape.width
        if channels == 1:
            raise PartArgumentError("block", block, "at least 2, because both streams need a channel of the image")
        if width < channels or width % 2:
            raise PartArgumentError("width", width, f"an even number, at least the {channels} channels before padding")
        first = (channels + 1) // 2 if zeros == "halves" else min(channels, width // 2)
        self._halves = (first, channels - first)
        self._zeros = tuple(width // 2 - half for half in self._halves)
        self.out_shape = replace(self._fold.out_shape, width=width)

    def forward(self, x: Tensor) -> Tensor:
        halves = self._fold(x).split(self._halves, dim=1)
        return torch.cat([F.pad(half, (0, 0, 0, 0, 0, zeros)) for half, zeros in zip(halves, self._zeros, strict=True)], dim=1)

    def inverse(self, y: Tensor) -> Tensor:
        """Return x such that `self(x)` is y, bit for bit."""
        halves = zip(y.chunk(2, dim=1), self._halves, strict=True)
        return self._fold.inverse(torch.cat([padded[:, :half] for padded, half in halves], dim=1))
