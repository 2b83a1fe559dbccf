"""Attention branches: norm, attention, drop path, without the residual, which the coupling is."""

from timm.layers import Attention, DropPath, LayerScale
from torch import Tensor, nn

from revzoo.bounds import PositiveInt
from revzoo.errors import PartArgumentError
from revzoo.parts.context import BuildContext
from revzoo.parts.norm import TokenNorm, token_norm
from revzoo.registry import branches


@branches.register("attention")
class AttentionBranch(nn.Module):
    """Attend globally over normalised tokens.

    Shapes: (B, N, D) -> (B, N, D), D divisible by heads; mask (B, N), False where no token is.
    Args:
        heads: number of attention heads.
        norm: in front of the attention.
        qkv_bias: whether queries, keys and values have a bias.
        layer_scale: whether what attention returns is multiplied by a learned factor per channel, at first 1e-5.
    Source: Rev-ViT's F (SlowFast `reversible_mvit.py`, AttentionSubBlock); q, k and v are one matrix here, as in timm.
        LayerScale (Touvron et al. 2021, CaiT) is DeiT III's.
    """

    def __init__(
        self,
        at: BuildContext,
        *,
        heads: PositiveInt,
        norm: TokenNorm = "layer_norm",
        qkv_bias: bool = True,
        layer_scale: bool = False,
    ):
        super().__init__()
        at.require("tokens", "attention")
        if at.width % heads:
            raise PartArgumentError("heads", heads, f"a divisor of the width {at.width}")
        self.norm = token_norm(norm, at.width)
        self.attn = Attention(at.width, num_heads=heads, qkv_bias=qkv_bias)
        self.ls = LayerScale(at.width) if layer_scale else nn.Identity()
        self.drop_path = DropPath(at.drop_path)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        attended = self.attn(self.norm(x), attn_mask=None if mask is None else mask[:, None, None, :])
        out: Tensor = self.drop_path(self.ls(attended))
        return out
