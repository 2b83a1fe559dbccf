"""Attention over all tokens: with the parameter names of timm, of Transformers, and with pooled keys and values.

B examples, N tokens, D channels, M heads.
"""

import torch.nn.functional as F
from timm.layers import Attention, LayerScale
from torch import Tensor, nn

from revzoo.bounds import PositiveFloat, PositiveInt, Rate
from revzoo.parts.context import BuildContext
from revzoo.parts.layers.bert_sub_block import BertSubBlock, NormPosition
from revzoo.parts.layers.convolution import TokenNorm, build_token_norm
from revzoo.parts.layers.drop_path import DropPath
from revzoo.parts.layers.multiscale_attention import build_multiscale_attention, check_pooling
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
        return self.drop_path(self.ls(attended))


@branches.register("self_attention")
class SelfAttentionBranch(BertSubBlock):
    """Let each token attend to all tokens, with separate matrices for queries, keys and values.

    Shapes: (B, N, D) -> (B, N, D), D divisible by heads; mask (B, N), False at padding.
    Args:
        heads: number of attention heads.
        norm_position: `post` is LayerNorm(x + change), with a residual inside; `pre` is the change computed from LayerNorm(x).
        eps: eps of the LayerNorm.
        attention_dropout: probability of dropping an attention weight, in [0, 1).
        dropout: probability of dropping a channel of the change, in [0, 1).
    Source: Transformers' BertAttention and RobertaAttention; post as F in MEFT (Liao et al. 2023, `modeling_revbert.py`).
    """

    def __init__(
        self,
        context: BuildContext,
        *,
        heads: PositiveInt,
        norm_position: NormPosition = "post",
        eps: PositiveFloat = 1e-5,
        attention_dropout: Rate = 0.0,
        dropout: Rate = 0.0,
    ):
        width = context.width
        super().__init__(context, "self_attention", width, norm_position, eps, dropout)
        context.require_divisor("heads", heads)
        self._heads, self._attention_dropout = heads, attention_dropout
        self.self = nn.ModuleDict({name: nn.Linear(width, width) for name in ("query", "key", "value")})

    def _inner(self, x: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = (self.self[name](x).unflatten(2, (self._heads, -1)).transpose(1, 2) for name in ("query", "key", "value"))
        attn_mask = None if mask is None else mask[:, None, None, :]
        rate = self._attention_dropout if self.training else 0.0
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, dropout_p=rate)  # (B, M, N, D / M)
        return attended.transpose(1, 2).flatten(2)


@branches.register("pooling_attention")
class PoolingAttention(nn.Module):
    """Normalise the tokens and let each attend to keys and values that a depthwise 3x3 convolution has pooled on the grid.

    Shapes: (B, H W, D) -> (B, H W, D), D divisible by heads, H and W by kv_stride.
    Args:
        heads: number of attention heads.
        kv_stride: stride of the pooling of keys and values, which is a convolution and a norm even with stride 1.
        pool_query: whether queries pass through a convolution (of stride 1) and a norm as well.
        relative_position: whether a learned bias depends on the distances along H and along W; needs a square grid.
        residual_pooling: whether the pooled queries are added to the attention's result.
    Source: Rev-MViT's F (SlowFast `reversible_mvit.py`, AttentionSubBlock), where the last three are off; MViTv2 (Li et
        al. 2022) has them on. The attention is timm's: q, k and v are one matrix.
    """

    def __init__(
        self,
        context: BuildContext,
        *,
        heads: PositiveInt,
        kv_stride: PositiveInt = 1,
        pool_query: bool = False,
        relative_position: bool = False,
        residual_pooling: bool = False,
    ):
        super().__init__()
        context.require_kind("grid", "pooling_attention")
        context.require_divisor("heads", heads)
        check_pooling(context, {"kv_stride": kv_stride}, relative_position)
        self.attn = build_multiscale_attention(
            context,
            context.width,
            heads,
            stride=1 if pool_query else None,
            kv_stride=kv_stride,
            relative_position=relative_position,
            residual_pooling=residual_pooling,
        )
        self.norm = build_token_norm("layer_norm", context.width)
        self._grid = list(context.sides)
        self.drop_path = DropPath(context.drop_path)

    def forward(self, x: Tensor) -> Tensor:
        attended, _ = self.attn(self.norm(x), self._grid)
        return self.drop_path(attended)
