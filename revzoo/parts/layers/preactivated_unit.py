"""The pre-activated residual unit of RevNet, without its residual, and the shortcut beside it."""

from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from revzoo.parts.layers.norm import build_batch_norm

UnitLayout = Literal["basic", "bottleneck"]


def build_preactivated_unit(
    width: int, out_width: int, *, layout: UnitLayout, stride: int = 1, preactivate: bool = True, momentum: float = 0.01
) -> nn.Sequential:
    """Return BatchNorm, ReLU and convolution, two or three times.

    `basic` has two 3x3 convolutions; `bottleneck` has 1x1, 3x3 and 1x1 with a quarter of the output width inside.

    Args:
        stride: stride of the first convolution.
        preactivate: False leaves the first BatchNorm and ReLU out, for an input that has just passed through both.
        momentum: momentum of BatchNorm's running statistics.
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
        unit.add_module(f"conv{i + 1}", nn.Conv2d(widths[i], widths[i + 1], kernel, strides[i], kernel // 2, bias=False))
    return unit


def build_shortcut(width: int, out_width: int, stride: int, layout: UnitLayout) -> nn.Module:
    """Return the shortcut beside a unit of this layout that may change size or width.

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
