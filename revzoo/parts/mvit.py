"""The transition of converted MViTs: the blocks of an ordinary one that pool the tokens or widen them."""

from functools import partial
from typing import Literal, cast

from timm.layers import LayerNorm
from timm.models.mvitv2 import MultiScaleBlock
from torch import Tensor, nn

from revzoo.bounds import PositiveFloat, PositiveInt
from revzoo.errors import PartArgumentError
from revzoo.parts.context import BuildContext, Shape, joined
from revzoo.registry import transitions


@transitions.register("multiscale_block")
class MultiScaleTransition(nn.Module):
    """Fuse the streams, run an ordinary MViTv2 block whose queries are pooled, and hand its output to both streams.

    Where `widening_heads` is set, a block of the grid that arrives goes in front, which widens the tokens in its MLP; else
    the attention of the one that pools does.

    Shapes: x1, x2: (B, H W, C) -> (B, H W / stride^2, width), width divisible by heads, H and W by all strides.
    Args:
        heads: number of attention heads.
        stride: of the pooling of queries.
        kv_stride: of the pooling of keys and values, counted on the grid that arrives.
        fuse: `mean` of the streams, or `last`, the newer one, x2, alone.
        mlp_ratio: hidden width of the blocks' MLPs over the width of what enters them.
        relative_position: whether a learned bias depends on the distances along H and along W; the grid is then square.
        residual_pooling: whether the pooled queries are added to what attention returns.
        widening_heads: attention heads of the widening block; null is no such block.
        widening_kv_stride: of its pooling of keys and values.
    Source: MViTv2 (Li et al. 2022), timm `mvitv2.py`, MultiScaleBlock, with (`expand_attn`) and without widening attention.
    """

    def __init__(
        self,
        at: BuildContext,
        *,
        heads: PositiveInt,
        stride: PositiveInt = 2,
        kv_stride: PositiveInt = 1,
        fuse: Literal["mean", "last"] = "mean",
        mlp_ratio: PositiveFloat = 4.0,
        relative_position: bool = True,
        residual_pooling: bool = True,
        widening_heads: PositiveInt | None = None,
        widening_kv_stride: PositiveInt = 1,
    ):
        super().__init__()
        at.require("grid", "multiscale_block")
        size, width = at.sides, at.shape.width
        for name, number, channels in (("heads", heads, at.width), ("widening_heads", widening_heads or 1, width)):
            if channels % number:
                raise PartArgumentError(name, number, f"a divisor of the width {channels}")
        for name, step in (("stride", stride), ("kv_stride", kv_stride), ("widening_kv_stride", widening_kv_stride)):
            if any(side % step for side in size):
                raise PartArgumentError(name, step, f"a divisor of both sides of the {size[0]}x{size[1]} grid")
        if relative_position and size[0] != size[1]:
            raise PartArgumentError(
                "relative_position", relative_position, f"false, or a square grid instead of {size[0]}x{size[1]}"
            )
        if min(width, at.width) * mlp_ratio < 1:
            raise PartArgumentError(
                "mlp_ratio", mlp_ratio, f"a ratio that leaves a hidden channel of the width {min(width, at.width)}"
            )
        self._grid, self._fuse = list(size), fuse
        self.out_shape = Shape(at.width, (size[0] // stride, size[1] // stride), "tokens")
        block = partial(
            MultiScaleBlock,
            feat_size=size,
            mlp_ratio=mlp_ratio,
            drop_path=at.drop_path,
            norm_layer=cast(type[nn.Module], partial(LayerNorm, eps=1e-6)),
            kernel_q=(3, 3),
            kernel_kv=(3, 3),
            has_cls_token=False,
            rel_pos_type="spatial" if relative_position else "none",
            residual_pooling=residual_pooling,
        )
        self.blocks = nn.ModuleList()
        if widening_heads is not None:
            pools = (widening_kv_stride, widening_kv_stride)
            self.blocks.append(block(width, at.width, widening_heads, expand_attn=False, stride_kv=pools))
            width = at.width
        strides, pools = (stride, stride), (kv_stride, kv_stride)
        self.blocks.append(block(width, at.width, heads, expand_attn=True, stride_q=strides, stride_kv=pools))

    def forward(self, x1: Tensor, x2: Tensor) -> tuple[Tensor, Tensor]:
        x, grid = joined(x1, x2, self._fuse), self._grid
        for block in self.blocks:
            x, grid = block(x, grid)
        return x, x
