"""Stems: from the input to the tensor that is split into two streams."""

from dataclasses import replace
from math import prod
from typing import Literal

import torch
import torch.nn.functional as F
from timm.layers import PatchEmbed
from timm.models.mvitv2 import PatchEmbed as OverlapPatchEmbed
from torch import Tensor, nn

from revzoo.bijection import SpaceToDepth
from revzoo.bounds import PositiveFloat, PositiveInt, UnitInterval
from revzoo.errors import PartArgumentError
from revzoo.parts.context import BuildContext, Shape
from revzoo.parts.norm import batch_norm
from revzoo.registry import stems

Position = Literal["learned", "none"]
_IMAGES = "an input of kind image, or token_embed for texts"


@stems.register("patch_embed")
class PatchStem(nn.Module):
    """Embed non-overlapping patches, normalise them if asked to, and add a learned position to each.

    Shapes: (B, C, H, W) -> (B, H W / patch^2, width), one token more with a class token, which is the first one.
    Args:
        width: channels of a token.
        patch: side of a patch [pixels]; divides the image's sides.
        norm: of each token, before its position is added.
        class_token: whether a learned token is put in front of those of the patches, which are then no grid any more.
        position: `learned` adds one embedding per token, `patches` per patch and none to the class token; `none` adds nothing.
        position_std: of the embeddings' initial values. Small networks that average over tokens learn faster with 0.5.
    Source: ViT (Dosovitskiy et al. 2021), without class token as Rev-ViT uses it (SlowFast `reversible_mvit.py`); DeiT III
        (Touvron et al. 2022) has `patches`; Swin (Liu et al. 2021) has the norm and no position. Parameters are timm's.
    """

    def __init__(
        self,
        at: BuildContext,
        *,
        width: PositiveInt,
        patch: PositiveInt,
        norm: Literal["layer_norm_1e-5", "none"] = "none",
        class_token: bool = False,
        position: Literal["learned", "patches", "none"] = "learned",
        position_std: PositiveFloat = 0.02,
    ):
        super().__init__()
        size = at.shape.size
        at.require("image", "patch_embed", _IMAGES)
        if any(side % patch for side in size):
            raise PartArgumentError("patch", patch, f"a divisor of both sides of the {size[0]}x{size[1]} image")
        patches = Shape(width, tuple(side // patch for side in size), "tokens")
        self.out_shape = replace(patches, size=(1 + prod(patches.size),)) if class_token else patches
        norm_layer = None if norm == "none" else nn.LayerNorm  # whose eps is 1e-5
        self.patch_embed = PatchEmbed((size[0], size[1]), patch, at.shape.width, width, norm_layer)
        self.cls_token = nn.Parameter(1e-6 * torch.randn(1, 1, width)) if class_token else None  # as timm begins
        self._late = position == "patches"  # whether the class token comes after the positions
        embedded = patches if self._late else self.out_shape
        self.pos_embed = _positions("none" if position == "none" else "learned", embedded, position_std)

    def forward(self, x: Tensor) -> Tensor:
        tokens: Tensor = self.patch_embed(x)
        if not self._late:
            tokens = self._with_class(tokens)
        if self.pos_embed is not None:
            tokens = tokens + self.pos_embed
        return self._with_class(tokens) if self._late else tokens

    def _with_class(self, tokens: Tensor) -> Tensor:
        return tokens if self.cls_token is None else torch.cat((self.cls_token.expand(len(tokens), -1, -1), tokens), dim=1)


@stems.register("conv")
class ConvStem(nn.Module):
    """Convolve, normalise and rectify; optionally max-pool to half the size.

    Shapes: (B, C, H, W) -> (B, width, H / stride, W / stride), halved again by `pool`.
    Args:
        width: channels.
        kernel: side of the kernel [pixels], odd.
        stride: of the convolution.
        pool: whether a 3x3 max-pool of stride 2 follows.
        momentum: of BatchNorm's running statistics.
    Source: RevNet (revnet-public `resnet_model.py`); padding is symmetric here, TensorFlow's SAME is not at stride 2.
    """

    def __init__(
        self,
        at: BuildContext,
        *,
        width: PositiveInt,
        kernel: PositiveInt = 3,
        stride: PositiveInt = 1,
        pool: bool = False,
        momentum: UnitInterval = 0.01,
    ):
        super().__init__()
        at.require("image", "conv", _IMAGES)
        if kernel % 2 == 0:
            raise PartArgumentError("kernel", kernel, "odd numbers")
        shrink = stride * (2 if pool else 1)
        if any(side % shrink for side in at.shape.size):
            raise PartArgumentError("stride", stride, f"sides {at.shape.size} divisible by stride{' times 2' if pool else ''}")
        self.out_shape = Shape(width, tuple(side // shrink for side in at.shape.size), "image")
        self.conv = nn.Conv2d(at.shape.width, width, kernel, stride, kernel // 2, bias=False)
        self.norm = batch_norm(width, momentum)
        self.pool = nn.MaxPool2d(3, 2, 1) if pool else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        pooled: Tensor = self.pool(self.norm(self.conv(x)))
        return pooled


@stems.register("overlap_patch_embed")
class OverlapPatchStem(nn.Module):
    """Embed overlapping patches and add a learned position to each.

    Shapes: (B, C, H, W) -> (B, H W / stride^2, width), the tokens' grid being H / stride by W / stride.
    Args:
        width: channels of a token.
        kernel: side of a patch [pixels], odd; half of it, rounded down, is padded on every side.
        stride: from patch to patch [pixels]; divides the image's sides.
        position: `learned` adds one embedding per token; `none` adds nothing.
        position_std: of the embeddings' initial values.
    Source: MViT (Fan et al. 2021) without class token, as Rev-MViT uses it (SlowFast `stem_helper.py`, PatchEmbed).
    """

    def __init__(
        self,
        at: BuildContext,
        *,
        width: PositiveInt,
        kernel: PositiveInt = 7,
        stride: PositiveInt = 4,
        position: Position = "learned",
        position_std: PositiveFloat = 0.02,
    ):
        super().__init__()
        size = at.shape.size
        at.require("image", "overlap_patch_embed", _IMAGES)
        if kernel % 2 == 0:
            raise PartArgumentError("kernel", kernel, "odd numbers")
        if any(side % stride for side in size):
            raise PartArgumentError("stride", stride, f"a divisor of both sides of the {size[0]}x{size[1]} image")
        self.out_shape = Shape(width, tuple(side // stride for side in size), "tokens")
        pad = kernel // 2
        self.patch_embed = OverlapPatchEmbed(at.shape.width, width, (kernel, kernel), (stride, stride), (pad, pad))
        self.pos_embed = _positions(position, self.out_shape, position_std)

    def forward(self, x: Tensor) -> Tensor:
        tokens: Tensor = self.patch_embed(x)[0]
        return tokens if self.pos_embed is None else tokens + self.pos_embed


@stems.register("space_to_depth")
class SqueezeStem(SpaceToDepth):
    """Fold squares of pixels into the channels; nothing is lost.

    Shapes: (B, C, H, W) -> (B, block^2 C, H / block, W / block).
    Args:
        block: side of a square [pixels]; divides the image's sides.
    Source: i-RevNet (Jacobsen et al. 2018), the bijective one's psi in front of the first block.
    """

    def __init__(self, at: BuildContext, *, block: PositiveInt = 2):
        super().__init__(block)
        size = at.shape.size
        at.require("image", "space_to_depth", _IMAGES)
        if any(side % block for side in size):
            raise PartArgumentError("block", block, f"a divisor of both sides of the {size[0]}x{size[1]} image")
        self.out_shape = Shape(block * block * at.shape.width, tuple(side // block for side in size), "image")


@stems.register("pad_channels")
class PadStem(nn.Module):
    """Append channels of zeros to each half of the channels, so that a network can be wider than its input.

    Both streams behind a channel split then see the image. One that were all zeros could not be rebuilt: BatchNorm would
    divide by their variance what rounding leaves there.

    Shapes: (B, C, H, W) -> (B, width, H / block, W / block).
    Args:
        width: channels, even, at least block^2 C.
        block: side of the squares of pixels that are folded into the channels before [pixels]; divides the image's sides.
    Source: i-RevNet (Jacobsen et al. 2018), the injective one. pytorch-i-revnet (`models/model_utils.py`, injective_pad)
        appends all zeros at the end.
    """

    def __init__(self, at: BuildContext, *, width: PositiveInt, block: PositiveInt = 1):
        super().__init__()
        self._squeeze = SqueezeStem(at, block=block)
        channels = self._squeeze.out_shape.width
        if channels == 1:
            raise PartArgumentError("block", block, "at least 2, because both streams need a channel of the image")
        if width < channels or width % 2:
            raise PartArgumentError("width", width, f"an even number from the {channels} channels that are there")
        self._halves = ((channels + 1) // 2, channels // 2)
        self._zeros = tuple(width // 2 - half for half in self._halves)
        self.out_shape = replace(self._squeeze.out_shape, width=width)

    def forward(self, x: Tensor) -> Tensor:
        halves = self._squeeze(x).split(self._halves, dim=1)
        return torch.cat([F.pad(half, (0, 0, 0, 0, 0, zeros)) for half, zeros in zip(halves, self._zeros, strict=True)], dim=1)

    def inverse(self, y: Tensor) -> Tensor:
        """Return x such that `self(x)` is y, bit for bit."""
        halves = zip(y.chunk(2, dim=1), self._halves, strict=True)
        return self._squeeze.inverse(torch.cat([padded[:, :half] for padded, half in halves], dim=1))


def _positions(kind: Position, tokens: Shape, std: float) -> nn.Parameter | None:
    """Return an embedding of each token's position, (1, N, D), or None."""
    if kind == "none":
        return None
    embedding = nn.Parameter(torch.empty(1, *tokens.dims))
    nn.init.trunc_normal_(embedding, std=std)
    return embedding
