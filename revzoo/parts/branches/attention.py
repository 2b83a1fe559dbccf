"""The attention branch of vision transformers: norm, attention over all tokens, drop path. The coupling adds the residual."""

from timm.layers import Attention, LayerScale
from torch import Tensor, nn

from revzoo.bounds import PositiveInt
from revzoo.parts.context import BuildContext
from revzoo.parts.layers.drop_path import DropPath
from revzoo.parts.layers.norm import TokenNorm, build_token_norm
from revzoo.registry import branches


@branches.register("attention")
class AttentionBranch(nn.Module):
    """Normalise the tokens and let each attend to all of them.

    Shapes: (B, N, D) -> (B, N, D), D divisible by heads; mask (B, N), False at padding.
    Args:
        heads: number of attention heads.
        norm: norm before the attention.
        qkv_bias: whether queries, keys and values have a bias.
        layer_scale: whether the attention's result is multiplied by a learned factor per channel, initially 1e-5.
    Source: Rev-ViT's F (SlowFast `reversible_mvit.py`, AttentionSubBlock); q, k and v are one matrix here, as in timm.
        LayerScale (Touvron et al. 2021, CaiT) is DeiT III's.
    """

    def __init__(
        self,
        context: BuildContext,
        *,
        heads: PositiveInt,
        norm: TokenNorm = "layer_norm",
        qkv_bias: bool = True,
        layer_scale: bool = False,
    ):
        super().__init__()
        context.require_kind("tokens", "attention")
        context.require_divisor("heads", heads)
        self.norm = build_token_norm(norm, context.width)
        self.attn = Attention(context.width, num_heads=heads, qkv_bias=qkv_bias)
        self.ls = LayerScale(context.width) if layer_scale else nn.Identity()
        self.drop_path = DropPath(context.drop_path)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        attended = self.attn(self.norm(x), attn_mask=None if mask is None else mask[:, None, None, :])
        out: Tensor = self.drop_path(self.ls(attended))
        return out
