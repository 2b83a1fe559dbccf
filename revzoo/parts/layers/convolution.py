"""The units of convolutional networks, from which branches and transitions are built; their norms."""

from collections.abc import Iterator
from typing import Literal

import torch.nn.functional as F
from timm.layers import BatchNormAct2d, Conv2dSame, get_act_layer, get_norm_layer
from torch import Tensor, nn

from revzoo.bounds import PositiveFloat, PositiveInt
from revzoo.errors import PartArgumentError
from revzoo.inplace_abn.layer import InPlaceABN2d
from revzoo.invertible import CoupledConv2d, InvertibleBatchNorm2d, InvertibleLeakyReLU
from revzoo.parts.context import BuildContext
from revzoo.parts.layers.drop_path import DropPath

TokenNorm = Literal["layer_norm", "layer_norm_1e-5", "rms_norm", "rms_norm_1e-5"]
LeakyNorm = Literal["in_place_abn", "leaky_batch_norm"]
ActivationName = Literal["gelu", "gelu_tanh", "relu", "silu"]  # gelu_tanh: GELU approximated with tanh


def build_token_norm(name: TokenNorm, width: int) -> nn.Module:
    """Return a norm over the last dimension, eps 1e-6 as in timm's and SlowFast's vision transformers, or 1e-5."""
    layer = name.removesuffix("_1e-5")
    return get_norm_layer(layer.replace("_", ""))(width, eps=1e-6 if layer == name else 1e-5)


def get_activation(name: ActivationName) -> type[nn.Module]:
    """Return the class of an activation."""
    return get_act_layer(name)


def build_batch_norm(width: int, momentum: float) -> nn.Module:
    """Return BatchNorm with eps 1e-3, followed by ReLU.

    Source: revnet-public `nnlib.py` (eps 1e-3, moving average decay 0.99, which is momentum 0.01 in PyTorch's terms).
    """
    return BatchNormAct2d(width, eps=1e-3, momentum=momentum, act_layer=nn.ReLU)


def build_leaky_norm(name: LeakyNorm, width: int, slope: float) -> nn.Module:
    """Return BatchNorm followed by leaky ReLU, as one layer that keeps its output alone, or as two."""
    if name == "in_place_abn":
        return InPlaceABN2d(width, slope=slope)
    return BatchNormAct2d(width, act_layer=nn.LeakyReLU, act_kwargs={"negative_slope": slope})


UnitLayout = Literal["basic", "bottleneck"]
Padding = Literal["symmetric", "same"]  # `same`: TensorFlow's, which at stride 2 pads more below and to the right


def build_convolution(width: int, out_width: int, kernel: int, stride: int = 1, padding: Padding = "symmetric") -> nn.Conv2d:
    """Return a convolution without bias whose output's sides are the input's over the stride."""
    if padding == "same" and stride > 1:  # at stride 1 the two are one
        return Conv2dSame(width, out_width, kernel, stride, bias=False)
    return nn.Conv2d(width, out_width, kernel, stride, kernel // 2, bias=False)


def build_preactivated_unit(
    width: int,
    out_width: int,
    *,
    layout: UnitLayout,
    stride: int = 1,
    preactivate: bool = True,
    momentum: float = 0.01,
    padding: Padding = "symmetric",
) -> nn.Sequential:
    """Return BatchNorm, ReLU and convolution, two or three times.

    `basic` has two 3x3 convolutions; `bottleneck` has 1x1, 3x3 and 1x1 with a quarter of the output width inside.

    Args:
        stride: stride of the first convolution.
        preactivate: False leaves the first BatchNorm and ReLU out, for an input that has just passed through both.
        momentum: momentum of BatchNorm's running statistics.
        padding: of the strided convolution.
    Source: revnet-public `resnet_model.py`, `_residual` and `_bottleneck_residual`.
    """
    middle = out_width if layout == "basic" else out_width // 4
    kernels = (3, 3) if layout == "basic" else (1, 3, 1)
    widths = [width, *[middle] * (len(kernels) - 1), out_width]
    strides = [stride, *[1] * (len(kernels) - 1)]
    unit = nn.Sequential()
    for i, kernel in enumerate(kernels):
        if i > 0 or preactivate:
            unit.add_module(f"norm{i + 1}", build_batch_norm(widths[i], momentum))
        unit.add_module(f"conv{i + 1}", build_convolution(widths[i], widths[i + 1], kernel, strides[i], padding))
    return unit


def build_shortcut(width: int, out_width: int, stride: int, layout: UnitLayout) -> nn.Module:
    """Return the shortcut around a unit of this layout that may change size or width.

    `basic` pools and pads with zero channels, `bottleneck` projects with a 1x1 convolution.

    Source: revnet-public `resnet_model.py`, `_possible_downsample` and `_possible_bottleneck_downsample`.
    """
    if stride == 1 and width == out_width:
        return nn.Identity()
    if layout == "basic":
        return _PoolAndPad(stride, (out_width - width) // 2)
    return nn.Conv2d(width, out_width, 1, stride, bias=False)


class _PoolAndPad(nn.Module):
    """Average-pool by `stride`, then put `channels` channels of zeros before the others and as many after them."""

    def __init__(self, stride: int, channels: int):
        super().__init__()
        self.stride, self.channels = stride, channels

    def forward(self, x: Tensor) -> Tensor:
        if self.stride > 1:
            x = F.avg_pool2d(x, self.stride)
        return F.pad(x, (0, 0, 0, 0, self.channels, self.channels)) if self.channels else x


class PreactivatedBlock(nn.Module):
    """Return x + unit(norm(x)), or, where width or size change, a 1x1 convolution of norm(x) in place of x.

    The unit convolves 1x1, 3x3 and 1x1, with norms between. Each norm is followed by leaky ReLU.

    Args:
        middle: channels inside; None means half of the width.
        groups: groups of the 3x3 convolution.
        norm: `in_place_abn` keeps the activation's output alone, `leaky_batch_norm` its own input too.
        slope: of leaky ReLU's negative side.
        stride: of the first 1x1 convolution; no spec sets it here, as it is no keyword.
    """

    def __init__(
        self,
        context: BuildContext,
        stride: int = 1,
        *,
        middle: PositiveInt | None = None,
        groups: PositiveInt = 1,
        norm: LeakyNorm = "in_place_abn",
        slope: PositiveFloat = 0.01,
    ):
        super().__init__()
        context.require_kind("image", "preactivated_block")
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
        return shortcut + self.drop_path(y)


def list_norm_and_activation(width: int, slope: float, eps_i: float) -> Iterator[tuple[str, nn.Module]]:
    """Yield an invertible BatchNorm and LeakyReLU with their names."""
    yield "norm", InvertibleBatchNorm2d(width, eps_i)
    yield "act", InvertibleLeakyReLU(slope)


def list_unit_layers(width: int, slope: float, eps_i: float) -> Iterator[tuple[str, nn.Module]]:
    """Yield the three layers of an invertible unit with their names."""
    yield "conv", CoupledConv2d(width)
    yield from list_norm_and_activation(width, slope, eps_i)


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
        return self.drop_path(x)


def divide_rounding_up(size: tuple[int, ...], stride: int) -> tuple[int, ...]:
    """Return the sides of an image after a padded convolution or pooling of this stride."""
    return tuple(-(-side // stride) for side in size)
