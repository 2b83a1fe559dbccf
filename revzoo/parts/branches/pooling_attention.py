"""The attention branch of MViT: norm, attention over pooled keys and values, drop path. The coupling adds the residual."""

from torch import Tensor, nn

from revzoo.bounds import PositiveInt
from revzoo.parts.context import BuildContext
from revzoo.parts.layers.drop_path import DropPath
from revzoo.parts.layers.multiscale_attention import build_multiscale_attention, check_pooling
from revzoo.parts.layers.norm import build_token_norm
from revzoo.registry import branches


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
        out: Tensor = self.drop_path(attended)
        return out
