"""Fuses: the two streams become one tensor again, which is then normalised."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from revzoo.bounds import UnitInterval
from revzoo.errors import PartArgumentError
from revzoo.parts.context import BuildContext, Shape
from revzoo.parts.layers.convolution import build_batch_norm, build_token_norm
from revzoo.parts.layers.join import join_streams
from revzoo.registry import fuses

FuseNorm = Literal["layer_norm", "layer_norm_1e-5", "batch_norm", "none"]


class NormedFuse(nn.Module):
    """The base of fuses: join the streams, then normalise. A subclass defines `join`.

    Args:
        norm: `layer_norm` (eps 1e-6) or `layer_norm_1e-5` for tokens, `batch_norm` (with ReLU) for images, or `none`.
        momentum: momentum of BatchNorm's running statistics.
    """

    widening = 1  # width of the joined tensor, in widths of one stream

    def __init__(self, context: BuildContext, *, norm: FuseNorm = "layer_norm", momentum: UnitInterval = 0.01):
        super().__init__()
        self.out_shape = replace(context.shape, width=self.widening * context.shape.width)
        self.norm = _build_norm(self.out_shape, norm, momentum)
        self._channel_dim = context.shape.channel_dim

    def forward(self, x1: Tensor, x2: Tensor) -> Tensor:
        return self.norm(self.join(x1, x2))

    def join(self, x1: Tensor, x2: Tensor) -> Tensor:
        """Return one tensor of both streams."""
        raise NotImplementedError


@fuses.register("concat")
class Concat(NormedFuse):
    """Concatenate the streams along the channels and normalise.

    Shapes: x1, x2: (B, N, D) or (B, C, H, W) -> one tensor with twice the channels.
    Args:
        norm: `layer_norm` (eps 1e-6) or `layer_norm_1e-5` for tokens, `batch_norm` (with ReLU) for images, or `none`.
        momentum: momentum of BatchNorm's running statistics.
    Source: Rev-ViT (LayerNorm over 2D); RevNet (`final_bn` and ReLU).
    """

    widening = 2

    def join(self, x1: Tensor, x2: Tensor) -> Tensor:
        return torch.cat((x1, x2), dim=self._channel_dim)

    @property
    def inverse(self) -> Callable[[Tensor], tuple[Tensor, ...]] | None:
        """The function from the fused tensor back to the streams, or None with a norm, which loses information."""
        return partial(torch.chunk, chunks=2, dim=self._channel_dim) if isinstance(self.norm, nn.Identity) else None


@fuses.register("mean")
class Mean(NormedFuse):
    """Average the streams and normalise.

    Shapes: x1, x2 -> one tensor of the same shape.
    Args:
        norm: `layer_norm` (eps 1e-6) or `layer_norm_1e-5` for tokens, `batch_norm` (with ReLU) for images, or `none`.
        momentum: momentum of BatchNorm's running statistics.
    Source: Reformer (Kitaev et al. 2020) as lucidrains/reformer-pytorch has it; MEFT (Liao et al. 2023) for BERT and RoBERTa;
        PaReprop's Rev-Swin (fusion `avg`).
    """

    def join(self, x1: Tensor, x2: Tensor) -> Tensor:
        return join_streams(x1, x2, "mean")


@fuses.register("last")
class Last(NormedFuse):
    """Keep only x2, the newer stream, and normalise.

    With `momentum` and `dual_residual`, a converted network starts as the original: x2 is the original's activation, x1 an
    earlier one.

    Shapes: x1, x2 -> one tensor of the same shape.
    Args:
        norm: `layer_norm` (eps 1e-6) or `layer_norm_1e-5` for tokens, `batch_norm` (with ReLU) for images, or `none`.
        momentum: momentum of BatchNorm's running statistics.
    Source: Dr2Net (Zhao et al. 2024) and Momentum ResNets (Sander et al. 2021), where the other stream is an earlier state.
    """

    def join(self, x1: Tensor, x2: Tensor) -> Tensor:
        return join_streams(x1, x2, "last")


@fuses.register("pooled_concat")
class PooledConcat(nn.Module):
    """Pool each stream over height and width, then concatenate along channels.

    For a head that pools anyway: the streams are never joined at full size, and their gradients come apart, so that each is
    freed when the step it belongs to has used it. One tensor (`split: none`) may come as halves of its channels, each
    pooled by itself.

    Shapes: x1, x2: (B, C, H, W) -> (B, 2 C, 1, 1); one tensor of C channels -> (B, C, 1, 1).
    Args:
        pool: `mean` or `max` over the pixels.
    Source: the head of Hascoet et al. 2023, which pools all pixels; before the streams are joined it needs less memory.
    """

    takes_halves = True
    norm = None

    def __init__(self, context: BuildContext, *, pool: Literal["mean", "max"] = "mean"):
        super().__init__()
        context.require_kind("image", "pooled_concat")
        self.out_shape = replace(context.shape, width=context.streams * context.shape.width, size=(1, 1))
        self._pool = pool
        self.widening = context.streams

    def join(self, *streams: Tensor) -> Tensor:
        """Return one tensor of the streams, at full size."""
        return torch.cat(streams, 1)

    def forward(self, *streams: Tensor) -> Tensor:
        return torch.cat([self._pool_pixels(x.flatten(2))[:, :, None, None] for x in streams], 1)

    def _pool_pixels(self, x: Tensor) -> Tensor:
        return x.mean(2) if self._pool == "mean" else x.max(2).values  # amax would keep x


@fuses.register("none")
class NoFuse(nn.Module):
    """Return the one tensor of a network without coupling.

    Shapes: x -> x.
    Source: ordinary networks; the layer-wise network of Hascoet et al. 2023, section 4.3.
    """

    widening, norm = 1, None

    def __init__(self, context: BuildContext):
        super().__init__()
        self.out_shape = context.shape

    def forward(self, x: Tensor) -> Tensor:
        return x

    def join(self, x: Tensor) -> Tensor:
        """Return the one tensor."""
        return x


def _build_norm(shape: Shape, name: FuseNorm, momentum: float) -> nn.Module:
    if name == "none":
        return nn.Identity()
    if shape.kind != ("image" if name == "batch_norm" else "tokens"):
        allowed = "batch_norm or none for images, layer_norm, layer_norm_1e-5 or none for tokens"
        raise PartArgumentError("norm", name, allowed)
    return build_batch_norm(shape.width, momentum) if name == "batch_norm" else build_token_norm(name, shape.width)
