"""The stem of MViTs: tokens of patches that overlap."""

from typing import Literal

from timm.models.mvitv2 import PatchEmbed
from torch import Tensor, nn

from revzoo.bounds import PositiveFloat, PositiveInt
from revzoo.errors import PartArgumentError
from revzoo.parts.context import BuildContext, Shape
from revzoo.parts.layers.position import build_position_embedding
from revzoo.registry import stems


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
        self.patch_embed = PatchEmbed(context.shape.width, width, (kernel, kernel), (stride, stride), (pad, pad))
        self.pos_embed = None if position == "none" else build_position_embedding(self.out_shape, position_std)

    def forward(self, x: Tensor) -> Tensor:
        tokens: Tensor = self.patch_embed(x)[0]
        return tokens if self.pos_embed is None else tokens + self.pos_embed
