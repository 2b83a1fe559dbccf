"""The transition of Rev-MViTs: fuse the streams, pool the tokens in an MViT block, and split again.

B images, H x W grid of tokens, C channels per stream, M heads.
"""

from typing import Literal, cast

import torch
from timm.layers import Mlp
from timm.models.mvitv2 import reshape_post_pool, reshape_pre_pool
from torch import Tensor, nn

from revzoo.bounds import PositiveFloat, PositiveInt
from revzoo.parts.context import BuildContext, Shape
from revzoo.parts.layers.convolution import build_token_norm
from revzoo.parts.layers.drop_path import DropPath
from revzoo.parts.layers.join import join_streams
from revzoo.parts.layers.multiscale_attention import build_multiscale_attention, check_pooling
from revzoo.registry import transitions


@transitions.register("fuse_pool_split")
class FusePoolSplit(nn.Module):
    """Fuse the streams, shrink the grid in an MViT block whose queries are pooled, and give its output to both streams.

    x = fuse(x1, x2);  x = pool(x) + attention(norm(x));  y1 = y2 = drop_path(x + mlp(norm(x))).

    pool is the convolution and the norm of the queries. A linear layer precedes it if x is not as wide as the stage.
    Drop path drops all of x, the shortcut included.

    Shapes: x1, x2: (B, H W, C) -> (B, H W / stride^2, width), width divisible by heads, H and W by both strides.
    Args:
        heads: number of attention heads.
        stride: stride of the pooling of queries.
        kv_stride: stride of the pooling of keys and values, on the grid before the pooling of queries.
        fuse: `concat` concatenates the channels, `mlp` adds an MLP of the concatenation to it, `mean` averages.
        fuse_ratio: hidden width of that MLP divided by 2 C.
        mlp_ratio: hidden width of the block's MLP divided by its width.
        relative_position: whether a learned bias depends on the distances along H and along W; needs a square grid.
        residual_pooling: whether the pooled queries are added to the attention's result.
    Source: Rev-MViT (Mangalam et al. 2022), section 3.3.1; SlowFast `reversible_mvit.py`, StageTransitionBlock with
        RES_PATH conv, and TwoStreamFusion's concat, concat_linear_{fuse_ratio} and avg. Parameters are named as in timm's
        MultiScaleBlock. That block's shortcut differs: it is max-pooled, and it projects the normalised tokens.
    """

    def __init__(
        self,
        context: BuildContext,
        *,
        heads: PositiveInt,
        stride: PositiveInt = 2,
        kv_stride: PositiveInt = 1,
        fuse: Literal["concat", "mlp", "mean"] = "mlp",
        fuse_ratio: PositiveFloat = 2.0,
        mlp_ratio: PositiveFloat = 4.0,
        relative_position: bool = False,
        residual_pooling: bool = False,
    ):
        super().__init__()
        width, out_width = context.shape.width * (1 if fuse == "mean" else 2), context.width
        context.require_kind("grid", "fuse_pool_split")
        context.require_divisor("heads", heads)
        check_pooling(context, {"stride": stride, "kv_stride": kv_stride}, relative_position)
        context.require_hidden_channel("fuse_ratio", fuse_ratio, width)
        context.require_hidden_channel("mlp_ratio", mlp_ratio)
        self.attn = build_multiscale_attention(
            context,
            width,
            heads,
            stride=stride,
            kv_stride=kv_stride,
            relative_position=relative_position,
            residual_pooling=residual_pooling,
        )
        self._grid, self._averages = list(context.sides), fuse == "mean"
        self.out_shape = Shape(out_width, tuple(side // stride for side in self._grid), "tokens")
        self.fuse = Mlp(width, int(width * fuse_ratio)) if fuse == "mlp" else None
        self.shortcut_proj_attn = nn.Identity() if width == out_width else nn.Linear(width, out_width)
        self.norm1 = build_token_norm("layer_norm", width)
        self.norm2 = build_token_norm("layer_norm", out_width)
        self.mlp = Mlp(out_width, int(out_width * mlp_ratio))
        self.drop_path = DropPath(context.drop_path)

    def forward(self, x1: Tensor, x2: Tensor) -> tuple[Tensor, Tensor]:
        x = self._fuse_streams(x1, x2)  # (B, H W, C or 2 C)
        attended, _ = self.attn(self.norm1(x), self._grid)  # (B, H W / stride^2, width)
        x = self._pool(self.shortcut_proj_attn(x)) + attended
        x = self.drop_path(x + self.mlp(self.norm2(x)))
        return x, x

    def _fuse_streams(self, x1: Tensor, x2: Tensor) -> Tensor:
        if self._averages:
            return join_streams(x1, x2, "mean")
        x = torch.cat((x1, x2), dim=2)
        return x if self.fuse is None else x + self.fuse(x)

    def _pool(self, x: Tensor) -> Tensor:
        """Pool tokens with the convolution and the norm of the queries, each head's channels by themselves."""
        heads = self.attn.num_heads
        pool, norm = cast(nn.Module, self.attn.pool_q), cast(nn.Module, self.attn.norm_q)
        x, _ = reshape_pre_pool(x.unflatten(2, (heads, -1)).transpose(1, 2), self._grid, has_cls_token=False)
        x, _ = reshape_post_pool(pool(x), heads)  # (B, M, H W / stride^2, width / M)
        return norm(x).transpose(1, 2).flatten(2)
