"""The stem of injective i-RevNets: channels of zeros make the network wider than its input."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from revzoo.bounds import PositiveInt
from revzoo.errors import PartArgumentError
from revzoo.parts.context import BuildContext
from revzoo.parts.stems.space_to_depth import SpaceToDepthStem
from revzoo.registry import stems


@stems.register("pad_channels")
class PadStem(nn.Module):
    """Append channels of zeros to each half of the channels, so that a network can be wider than its input.

    Behind a channel split, both streams then contain part of the image. A stream of nothing but zeros could not be
    reconstructed: BatchNorm would divide the rounding errors in it by their own standard deviation.

    Shapes: (B, C, H, W) -> (B, width, H / block, W / block).
    Args:
        width: channels after padding, even, at least block^2 C.
        block: side of the squares of pixels [pixels] that are folded into channels before padding; divides the image's sides.
    Source: i-RevNet (Jacobsen et al. 2018), the injective network. pytorch-i-revnet (`models/model_utils.py`, injective_pad)
        appends all zeros at the end instead.
    """

    def __init__(self, context: BuildContext, *, width: PositiveInt, block: PositiveInt = 1):
        super().__init__()
        self._fold = SpaceToDepthStem(context, block=block)
        channels = self._fold.out_shape.width
        if channels == 1:
            raise PartArgumentError("block", block, "at least 2, because both streams need a channel of the image")
        if width < channels or width % 2:
            raise PartArgumentError("width", width, f"an even number, at least the {channels} channels before padding")
        self._halves = ((channels + 1) // 2, channels // 2)
        self._zeros = tuple(width // 2 - half for half in self._halves)
        self.out_shape = replace(self._fold.out_shape, width=width)

    def forward(self, x: Tensor) -> Tensor:
        halves = self._fold(x).split(self._halves, dim=1)
        return torch.cat([F.pad(half, (0, 0, 0, 0, 0, zeros)) for half, zeros in zip(halves, self._zeros, strict=True)], dim=1)

    def inverse(self, y: Tensor) -> Tensor:
        """Return x such that `self(x)` is y, bit for bit."""
        halves = zip(y.chunk(2, dim=1), self._halves, strict=True)
        return self._fold.inverse(torch.cat([padded[:, :half] for padded, half in halves], dim=1))
