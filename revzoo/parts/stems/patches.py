"""Stems of vision transformers: one token for each patch of the image."""

from dataclasses import replace
from math import prod
from typing import Literal

import torch
from timm.layers import PatchEmbed
from timm.models.mvitv2 import PatchEmbed as OverlapPatchEmbed
from torch import Tensor, nn

from revzoo.bounds import PositiveFloat, PositiveInt
from revzoo.errors import PartArgumentError
from revzoo.parts.context import BuildContext, Shape
from revzoo.parts.layers.position import build_position_embedding
from revzoo.registry import stems


@stems.register("patch_embed")
class PatchStem(nn.Module):
    """Embed patches that do not overlap, optionally normalise them, and add a learned position to each.

    Shapes: (B, C, H, W) -> (B, H W / patch^2, width); with a class token there is one token more, the first.
    Args:
        width: channels of a token.
        patch: side of a patch [pixels]; divides the image's sides.
        norm: norm of each token before its position is added, or `none`.
        class_token: whether a learned token comes first. The tokens are then no longer a 2-dimensional grid.
        position: `learned` adds an embedding to each token, `patches` to each token but the class token; `none` adds nothing.
        position_std: standard deviation of the embeddings' initial values. Small networks that average over tokens learn
            faster with 0.5.
    Source: ViT (Dosovitskiy et al. 2021), without class token as Rev-ViT uses it (SlowFast `reversible_mvit.py`); DeiT III
        (Touvron et al. 2022) has `patches`; Swin (Liu et al. 2021) has the norm and no position. Parameters are timm's.
    """

    def __init__(
        self,
        context: BuildContext,
        *,
        width: PositiveInt,
        patch: PositiveInt,
        norm: Literal["layer_norm_1e-5", "none"] = "none",
        class_token: bool = False,
        position: Literal["learned", "patches", "none"] = "learned",
        position_std: PositiveFloat = 0.02,
    ):
        super().__init__()
        context.require_kind("image", "patch_embed")
        context.require_stride("patch", patch)
        size = context.sides
        patches = Shape(width, tuple(side // patch for side in size), "tokens")
        self.grid = patches.size
        self.out_shape = replace(patches, size=(1 + prod(patches.size),)) if class_token else patches
        norm_layer = None if norm == "none" else nn.LayerNorm  # whose eps is 1e-5
        self.patch_embed = PatchEmbed(size, patch, context.shape.width, width, norm_layer)
        self.cls_token = nn.Parameter(1e-6 * torch.randn(1, 1, width)) if class_token else None  # timm's initial values
        self._class_token_last = position == "patches"  # added as the first, once the others have their positions
        embedded = patches if self._class_token_last else self.out_shape
        self.pos_embed = None if position == "none" else build_position_embedding(embedded, position_std)

    def forward(self, x: Tensor) -> Tensor:
        tokens: Tensor = self.patch_embed(x)
        if not self._class_token_last:
            tokens = self._prepend_class_token(tokens)
        if self.pos_embed is not None:
            tokens = tokens + self.pos_embed
        return self._prepend_class_token(tokens) if self._class_token_last else tokens

    def _prepend_class_token(self, tokens: Tensor) -> Tensor:
        return tokens if self.cls_token is None else torch.cat((self.cls_token.expand(tokens.shape[0], -1, -1), tokens), dim=1)


@stems.register("overlap_patch_embed")
class OverlapPatchStem(nn.Module):
    """Embed overlapping patches and add a learned position to each.

    Shapes: (B, C, H, W) -> (B, H W / stride^2, width), a grid of H / stride by W / stride tokens.
    Args:
        width: channels of a token.
        kernel: side of a patch [pixels], odd; half of it, rounded down, is padded on every side.
        stride: distance between neighbouring patches [pixels]; divides the image's sides.
        position: `learned` adds an embedding to each token; `none` adds nothing.
        position_std: standard deviation of the embeddings' initial values.
    Source: MViT (Fan et al. 2021) without class token, as Rev-MViT uses it (SlowFast `stem_helper.py`, PatchEmbed).
    """

    def __init__(
        self,
        context: BuildContext,
        *,
        width: PositiveInt,
        kernel: PositiveInt = 7,
        stride: PositiveInt = 4,
        position: Literal["learned", "none"] = "learned",
        position_std: PositiveFloat = 0.02,
    ):
        super().__init__()
        context.require_kind("image", "overlap_patch_embed")
        if kernel % 2 == 0:
            raise PartArgumentError("kernel", kernel, "an odd number")
        context.require_stride("stride", stride)
        self.out_shape = Shape(width, tuple(side // stride for side in context.sides), "tokens")
        self.grid = self.out_shape.size
        pad = kernel // 2
        self.patch_embed = OverlapPatchEmbed(context.shape.width, width, (kernel, kernel), (stride, stride), (pad, pad))
        self.pos_embed = None if position == "none" else build_position_embedding(self.out_shape, position_std)

    def forward(self, x: Tensor) -> Tensor:
        tokens: Tensor = self.patch_embed(x)[0]
        return tokens if self.pos_embed is None else tokens + self.pos_embed
