"""Fuses: the two streams become one tensor again."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from revzoo.bounds import UnitInterval
from revzoo.errors import PartArgumentError
from revzoo.parts.context import BuildContext, Shape, joined
from revzoo.parts.norm import batch_norm, token_norm
from revzoo.registry import fuses

FuseNorm = Literal["layer_norm", "layer_norm_1e-5", "batch_norm", "none"]


@fuses.register("concat")
class Concat(nn.Module):
    """Join the streams along the channels and normalise.

    Shapes: x1, x2: (B, N, D) or (B, C, H, W) -> twice the channels.
    Args:
        norm: `layer_norm` (eps 1e-6) or `layer_norm_1e-5` for tokens, `batch_norm` (with ReLU) for images, or `none`.
        momentum: of BatchNorm's running statistics.
    Source: Rev-ViT (LayerNorm over 2D); RevNet (`final_bn` and ReLU).
    """

    def __init__(self, at: BuildContext, *, norm: FuseNorm = "layer_norm", momentum: UnitInterval = 0.01):
        super().__init__()
        self.out_shape = replace(at.shape, width=2 * at.shape.width)
        self._dim = 1 if at.shape.layout == "image" else 2
        self.norm = _norm(self.out_shape, norm, momentum)

    def forward(self, x1: Tensor, x2: Tensor) -> Tensor:
        fused: Tensor = self.norm(torch.cat((x1, x2), dim=self._dim))
        return fused

    @property
    def inverse(self) -> Callable[[Tensor], tuple[Tensor, ...]] | None:
        """The streams of what was joined, as a function, or None behind a norm, which loses information."""
        return partial(torch.chunk, chunks=2, dim=self._dim) if isinstance(self.norm, nn.Identity) else None


@fuses.register("mean")
class Mean(nn.Module):
    """Average the streams and normalise.

    Shapes: x1, x2 -> the shape of one.
    Args:
        norm: `layer_norm` (eps 1e-6) or `layer_norm_1e-5` for tokens, `batch_norm` (with ReLU) for images, or `none`.
        momentum: of BatchNorm's running statistics.
    Source: Reformer (Kitaev et al. 2020) as lucidrains/reformer-pytorch has it; MEFT (Liao et al. 2023) for BERT and RoBERTa;
        PaReprop's Rev-Swin (fusion `avg`).
    """

    def __init__(self, at: BuildContext, *, norm: FuseNorm = "layer_norm", momentum: UnitInterval = 0.01):
        super().__init__()
        self.out_shape = at.shape
        self.norm = _norm(self.out_shape, norm, momentum)

    def forward(self, x1: Tensor, x2: Tensor) -> Tensor:
        fused: Tensor = self.norm(joined(x1, x2, "mean"))
        return fused


@fuses.register("last")
class Last(nn.Module):
    """Go on with the newer stream alone and normalise.

    For couplings that begin as an ordinary network, whose only stream it is.

    Shapes: x1, x2 -> the shape of x2.
    Args:
        norm: `layer_norm` (eps 1e-6) or `layer_norm_1e-5` for tokens, `batch_norm` (with ReLU) for images, or `none`.
        momentum: of BatchNorm's running statistics.
    Source: Dr2Net (Zhao et al. 2024) and Momentum ResNets (Sander et al. 2021), where the other stream is the past.
    """

    def __init__(self, at: BuildContext, *, norm: FuseNorm = "layer_norm", momentum: UnitInterval = 0.01):
        super().__init__()
        self.out_shape = at.shape
        self.norm = _norm(self.out_shape, norm, momentum)

    def forward(self, x1: Tensor, x2: Tensor) -> Tensor:
        fused: Tensor = self.norm(joined(x1, x2, "last"))
        return fused


def _norm(shape: Shape, name: FuseNorm, momentum: float) -> nn.Module:
    if name == "none":
        return nn.Identity()
    if shape.layout != ("image" if name == "batch_norm" else "tokens"):
        allowed = "batch_norm or none behind images, layer_norm, layer_norm_1e-5 or none behind tokens"
        raise PartArgumentError("norm", name, allowed)
    return batch_norm(shape.width, momentum) if name == "batch_norm" else token_norm(name, shape.width)
