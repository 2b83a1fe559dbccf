"""MViT's attention over pooled keys and values: a branch, and the transition that pools the queries and so the tokens."""

from functools import partial
from typing import Literal, cast

import torch
from timm.layers import DropPath, LayerNorm, Mlp
from timm.models.mvitv2 import MultiScaleAttention, reshape_post_pool, reshape_pre_pool
from torch import Tensor, nn

from revzoo.bounds import PositiveFloat, PositiveInt
from revzoo.errors import PartArgumentError
from revzoo.parts.context import BuildContext, Shape
from revzoo.parts.norm import token_norm
from revzoo.registry import branches, transitions

_KERNEL = (3, 3)  # of every pooling convolution (PySlowFast's POOL_KVQ_KERNEL)


@branches.register("pooling_attention")
class PoolingAttention(nn.Module):
    """Attend to keys and values that a depthwise 3x3 convolution has pooled on the grid of tokens.

    Shapes: (B, H W, D) -> (B, H W, D), D divisible by heads, H and W by kv_stride.
    Args:
        heads: number of attention heads.
        kv_stride: of the pooling of keys and values, which is a convolution and a norm even with stride 1.
        pool_query: whether queries pass through a convolution (of stride 1) and a norm as well.
        relative_position: whether a learned bias depends on the distances along H and along W; the grid is then square.
        residual_pooling: whether the pooled queries are added to what attention returns.
    Source: Rev-MViT's F (SlowFast `reversible_mvit.py`, AttentionSubBlock), where the last three are off; MViTv2 (Li et
        al. 2022) has them on. The attention is timm's: q, k and v are one matrix.
    """

    def __init__(
        self,
        at: BuildContext,
        *,
        heads: PositiveInt,
        kv_stride: PositiveInt = 1,
        pool_query: bool = False,
        relative_position: bool = False,
        residual_pooling: bool = False,
    ):
        super().__init__()
        self.attn = _attention(at, at.width, heads, None, kv_stride, pool_query, relative_position, residual_pooling)
        self.norm = token_norm("layer_norm", at.width)
        self._grid = list(at.shape.size)
        self.drop_path = DropPath(at.drop_path)

    def forward(self, x: Tensor) -> Tensor:
        attended, _ = self.attn(self.norm(x), self._grid)
        out: Tensor = self.drop_path(attended)
        return out


@transitions.register("fuse_pool_split")
class FusePoolSplit(nn.Module):
    """Fuse the streams, shrink the grid in an MViT block whose queries are pooled, and hand its output to both streams.

    x = fuse(x1, x2);  x = pool(x) + attention(norm(x));  y1 = y2 = drop_path(x + mlp(norm(x))).

    pool is the convolution and the norm of the queries, behind a linear layer where x has another width than the stage.
    Dropping a path drops all of x, the shortcut with it.

    Shapes: x1, x2: (B, H W, C) -> (B, H W / stride^2, width), width divisible by heads, H and W by both strides.
    Args:
        heads: number of attention heads.
        stride: of the pooling of queries.
        kv_stride: of the pooling of keys and values, counted on the grid that arrives.
        fuse: `concat` joins the channels, `mlp` adds to that an MLP of it, `mean` is the mean.
        fuse_ratio: hidden width of that MLP over 2 C.
        mlp_ratio: hidden width of the block's MLP over its width.
        relative_position: whether a learned bias depends on the distances along H and along W; the grid is then square.
        residual_pooling: whether the pooled queries are added to what attention returns.
    Source: Rev-MViT (Mangalam et al. 2022), section 3.3.1; SlowFast `reversible_mvit.py`, StageTransitionBlock with
        RES_PATH conv, and TwoStreamFusion's concat, concat_linear_{fuse_ratio} and avg. Parameters are named as in timm's
        MultiScaleBlock, whose shortcut differs: it is max-pooled, and its projection is of the norm.
    """

    def __init__(
        self,
        at: BuildContext,
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
        width = at.shape.width * (1 if fuse == "mean" else 2)
        self.attn = _attention(at, width, heads, stride, kv_stride, True, relative_position, residual_pooling)
        for name, ratio, inner in (("fuse_ratio", fuse_ratio, width), ("mlp_ratio", mlp_ratio, at.width)):
            if inner * ratio < 1:
                raise PartArgumentError(name, ratio, f"a ratio that leaves a hidden channel of the width {inner}")
        self._grid, self._mean = list(at.shape.size), fuse == "mean"
        self.out_shape = Shape(at.width, tuple(side // stride for side in self._grid), "tokens")
        self.fuse = Mlp(width, int(width * fuse_ratio)) if fuse == "mlp" else None
        self.shortcut_proj_attn = nn.Identity() if width == at.width else nn.Linear(width, at.width)
        self.norm1 = token_norm("layer_norm", width)
        self.norm2 = token_norm("layer_norm", at.width)
        self.mlp = Mlp(at.width, int(at.width * mlp_ratio))
        self.drop_path = DropPath(at.drop_path)

    def forward(self, x1: Tensor, x2: Tensor) -> tuple[Tensor, Tensor]:
        x = self._fused(x1, x2)  # (B, H W, C or 2 C)
        attended, _ = self.attn(self.norm1(x), self._grid)  # (B, H W / stride^2, width)
        x = self._pooled(self.shortcut_proj_attn(x)) + attended
        x = self.drop_path(x + self.mlp(self.norm2(x)))
        return x, x

    def _fused(self, x1: Tensor, x2: Tensor) -> Tensor:
        if self._mean:
            return (x1 + x2) / 2
        x = torch.cat((x1, x2), dim=2)
        return x if self.fuse is None else x + self.fuse(x)

    def _pooled(self, x: Tensor) -> Tensor:
        """Pool tokens by the queries' own convolution and norm, each head's channels by themselves."""
        heads = self.attn.num_heads
        pool, norm = cast(nn.Module, self.attn.pool_q), cast(nn.Module, self.attn.norm_q)
        x, _ = reshape_pre_pool(x.unflatten(2, (heads, -1)).transpose(1, 2), self._grid, has_cls_token=False)
        x, _ = reshape_post_pool(pool(x), heads)  # (B, M, H W / stride^2, width / M)
        pooled: Tensor = norm(x).transpose(1, 2).flatten(2)
        return pooled


def _attention(
    at: BuildContext,
    width: int,
    heads: int,
    stride: int | None,
    kv_stride: int,
    pool_query: bool,
    relative_position: bool,
    residual_pooling: bool,
) -> MultiScaleAttention:
    """Return timm's attention from `width` channels to the stage's, or raise PartArgumentError; `stride` is a transition's."""
    at.require("grid", "pooling_attention" if stride is None else "fuse_pool_split")
    size = at.sides
    if at.width % heads:
        raise PartArgumentError("heads", heads, f"a divisor of the width {at.width}")
    for name, step in (("stride", stride or 1), ("kv_stride", kv_stride)):
        if any(side % step for side in size):
            raise PartArgumentError(name, step, f"a divisor of both sides of the {size[0]}x{size[1]} grid")
    if relative_position and size[0] != size[1]:
        raise PartArgumentError(
            "relative_position", relative_position, f"false, or a square grid instead of {size[0]}x{size[1]}"
        )
    return MultiScaleAttention(
        width,
        at.width,
        feat_size=size,
        num_heads=heads,
        kernel_q=_KERNEL if pool_query else (1, 1),
        kernel_kv=_KERNEL,
        stride_q=(stride or 1, stride or 1),
        stride_kv=(kv_stride, kv_stride),
        has_cls_token=False,
        rel_pos_type="spatial" if relative_position else "none",
        residual_pooling=residual_pooling,
        norm_layer=cast(type[nn.Module], partial(LayerNorm, eps=1e-6)),
    )
