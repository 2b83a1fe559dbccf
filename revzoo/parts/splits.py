"""Splits: one tensor becomes the two streams, or stays one. They hold no parameters."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from revzoo.errors import PartArgumentError
from revzoo.parts.context import BuildContext
from revzoo.registry import splits


@splits.register("duplicate")
class Duplicate(nn.Module):
    """Give the same tensor to both streams.

    Shapes: x -> x, x.
    Source: Rev-ViT (Mangalam et al. 2022); PaReprop, section 3.4.
    """

    def __init__(self, context: BuildContext):
        super().__init__()
        self.out_shape = context.shape

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


@splits.register("none")
class NoSplit(nn.Module):
    """Leave one tensor, for a network without coupling: each block is y = f(x).

    Shapes: x -> x.
    Source: ordinary networks; the layer-wise network of Hascoet et al. 2023, section 4.3.
    """

    def __init__(self, context: BuildContext):
        super().__init__()
        self.out_shape = context.shape

    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (x,)


@splits.register("channel")
class ChannelSplit(nn.Module):
    """Give the first half of the channels to stream 1 and the second half to stream 2.

    Shapes: (B, C, ...) or (B, N, C) -> two tensors with half the channels.
    Source: RevNet (Gomez et al. 2017), section 3.1.
    """

    def __init__(self, context: BuildContext):
        super().__init__()
        shape = context.shape
        if shape.width % 2:
            raise PartArgumentError("type", "channel", f"an even number of channels to split; the stem gives {shape.width}")
        self.out_shape = replace(shape, width=shape.width // 2)
        self._dim = shape.channel_dim

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x1, x2 = x.chunk(2, dim=self._dim)
        return x1, x2

    def inverse(self, x1: Tensor, x2: Tensor) -> Tensor:
        """Return x such that `self(x)` is x1, x2."""
        return torch.cat((x1, x2), dim=self._dim)
