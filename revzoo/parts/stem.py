"""Stems: from the input to the tensor that is split into two streams."""

from typing import Literal

import torch
from timm.layers import PatchEmbed
from torch import Tensor, nn

from revzoo.bounds import Extent, Positive, Update
from revzoo.errors import MisfitError
from revzoo.parts.norm import batch_norm
from revzoo.parts.site import Shape, Site
from revzoo.registry import stems


@stems.register("patch_embed")
class PatchStem(nn.Module):
    """Embed non-overlapping patches and add a learned position to each.

    Shapes: (B, C, H, W) -> (B, H W / patch^2, width).
    Args:
        width: channels of a token.
        patch: side of a patch [pixels]; divides the image's sides.
        position: `learned` adds one embedding per token; `none` adds nothing.
        position_std: of the embeddings' initial values. Small networks that average over tokens learn faster with 0.5.
    Source: ViT (Dosovitskiy et al. 2021) without class token, as Rev-ViT uses it (SlowFast `reversible_mvit.py`).
    """

    def __init__(
        self,
        at: Site,
        *,
        width: Positive,
        patch: Positive,
        position: Literal["learned", "none"] = "learned",
        position_std: Extent = 0.02,
    ):
        super().__init__()
        size = at.shape.size
        if any(side % patch for side in size):
            raise MisfitError("patch", patch, f"a divisor of both sides of the {size[0]}x{size[1]} image")
        self.out_shape = Shape(width, tuple(side // patch for side in size), "tokens")
        self.patch_embed = PatchEmbed((size[0], size[1]), patch, at.shape.width, width)
        self.pos_embed: nn.Parameter | None = None
        if position == "learned":
            self.pos_embed = nn.Parameter(torch.empty(1, *self.out_shape.dims))
            nn.init.trunc_normal_(self.pos_embed, std=position_std)

    def forward(self, x: Tensor) -> Tensor:
        tokens: Tensor = self.patch_embed(x)
        return tokens if self.pos_embed is None else tokens + self.pos_embed


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
        at: Site,
        *,
        width: Positive,
        kernel: Positive = 3,
        stride: Positive = 1,
        pool: bool = False,
        momentum: Update = 0.01,
    ):
        super().__init__()
        if kernel % 2 == 0:
            raise MisfitError("kernel", kernel, "odd numbers")
        shrink = stride * (2 if pool else 1)
        if any(side % shrink for side in at.shape.size):
            raise MisfitError("stride", stride, f"sides {at.shape.size} divisible by stride{' times 2' if pool else ''}")
        self.out_shape = Shape(width, tuple(side // shrink for side in at.shape.size), "image")
        self.conv = nn.Conv2d(at.shape.width, width, kernel, stride, kernel // 2, bias=False)
        self.norm = batch_norm(width, momentum)
        self.pool = nn.MaxPool2d(3, 2, 1) if pool else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        pooled: Tensor = self.pool(self.norm(self.conv(x)))
        return pooled
