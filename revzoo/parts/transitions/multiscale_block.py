"""The transition of converted MViTs: the ordinary blocks that pool or widen the tokens."""

from functools import partial

from timm.models.mvitv2 import MultiScaleBlock
from torch import Tensor, nn

from revzoo.bounds import PositiveFloat, PositiveInt
from revzoo.parts.context import BuildContext, Shape
from revzoo.parts.layers.join import Join, join_streams
from revzoo.parts.layers.multiscale_attention import MULTISCALE_NORM, POOLING_KERNEL, check_pooling
from revzoo.registry import transitions


@transitions.register("multiscale_block")
class MultiScaleTransition(nn.Module):
    """Fuse the streams, run an ordinary MViTv2 block whose queries are pooled, and give its output to both streams.

    By default the attention of that block widens the tokens. With `widening_heads`, a block that does not pool queries comes
    first and widens the tokens in its MLP.

    Shapes: x1, x2: (B, H W, C) -> (B, H W / stride^2, width), width divisible by heads, H and W by all strides.
    Args:
        heads: number of attention heads.
        stride: stride of the pooling of queries.
        kv_stride: stride of the pooling of keys and values, on the grid before the pooling of queries.
        fuse: `mean` of the streams, or `last` for x2, the newer one, alone.
        mlp_ratio: hidden width of the blocks' MLPs divided by the width that enters the block.
        relative_position: whether a learned bias depends on the distances along H and along W; needs a square grid.
        residual_pooling: whether the pooled queries are added to the attention's result.
        widening_heads: number of attention heads of the widening block; null means no such block.
        widening_kv_stride: stride of the pooling of keys and values in the widening block.
    Source: MViTv2 (Li et al. 2022), timm `mvitv2.py`, MultiScaleBlock, with (`expand_attn`) and without widening attention.
    """

    def __init__(
        self,
        context: BuildContext,
        *,
        heads: PositiveInt,
        stride: PositiveInt = 2,
        kv_stride: PositiveInt = 1,
        fuse: Join = "mean",
        mlp_ratio: PositiveFloat = 4.0,
        relative_position: bool = True,
        residual_pooling: bool = True,
        widening_heads: PositiveInt | None = None,
        widening_kv_stride: PositiveInt = 1,
    ):
        super().__init__()
        width, out_width = context.shape.width, context.width
        context.require_kind("grid", "multiscale_block")
        context.require_divisor("heads", heads)
        context.require_divisor("widening_heads", widening_heads or 1, width)
        strides = {"stride": stride, "kv_stride": kv_stride, "widening_kv_stride": widening_kv_stride}
        check_pooling(context, strides, relative_position)
        context.require_hidden_channel("mlp_ratio", mlp_ratio, min(width, out_width))
        self._grid, self._fuse = list(context.sides), fuse
        self.out_shape = Shape(out_width, tuple(side // stride for side in self._grid), "tokens")
        build_block = partial(
            MultiScaleBlock,
            feat_size=context.sides,
            mlp_ratio=mlp_ratio,
            drop_path=context.drop_path,
            norm_layer=MULTISCALE_NORM,
            kernel_q=POOLING_KERNEL,
            kernel_kv=POOLING_KERNEL,
            has_cls_token=False,
            rel_pos_type="spatial" if relative_position else "none",
            residual_pooling=residual_pooling,
        )
        self.blocks = nn.ModuleList()
        if widening_heads is not None:
            kv_strides = (widening_kv_stride, widening_kv_stride)
            self.blocks.append(build_block(width, out_width, widening_heads, expand_attn=False, stride_kv=kv_strides))
            width = out_width
        q_strides, kv_strides = (stride, stride), (kv_stride, kv_stride)
        self.blocks.append(build_block(width, out_width, heads, expand_attn=True, stride_q=q_strides, stride_kv=kv_strides))

    def forward(self, x1: Tensor, x2: Tensor) -> tuple[Tensor, Tensor]:
        x, grid = join_streams(x1, x2, self._fuse), self._grid
        for block in self.blocks:
            x, grid = block(x, grid)
        return x, x
