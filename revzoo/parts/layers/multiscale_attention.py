"""MViT's attention over pooled queries, keys and values, as timm implements it."""

from functools import partial
from typing import cast

from timm.layers import LayerNorm
from timm.models.mvitv2 import MultiScaleAttention
from torch import nn

from revzoo.errors import PartArgumentError
from revzoo.parts.context import BuildContext

POOLING_KERNEL = (3, 3)  # of every pooling convolution (PySlowFast's POOL_KVQ_KERNEL)
MULTISCALE_NORM = cast(type[nn.Module], partial(LayerNorm, eps=1e-6))


def check_pooling(context: BuildContext, strides: dict[str, int], relative_position: bool) -> None:
    """Raise PartArgumentError unless the strides, given by argument, divide the grid of tokens.

    Relative positions need a square grid besides.
    """
    for argument, stride in strides.items():
        context.require_stride(argument, stride)
    height, width = context.sides
    if relative_position and height != width:
        allowed = f"false, or a square grid instead of {height}x{width}"
        raise PartArgumentError("relative_position", relative_position, allowed)


def build_multiscale_attention(
    context: BuildContext,
    width: int,
    heads: int,
    *,
    stride: int | None,
    kv_stride: int,
    relative_position: bool,
    residual_pooling: bool,
) -> MultiScaleAttention:
    """Return timm's attention from `width` channels to those of the stage.

    Args:
        stride: stride of the pooling of queries; None leaves the queries as they are, without convolution and norm.
        kv_stride: stride of the pooling of keys and values.
        relative_position: whether a learned bias depends on the distances along both sides of the grid.
        residual_pooling: whether the pooled queries are added to the attention's result.
    """
    return MultiScaleAttention(
        width,
        context.width,
        feat_size=context.sides,
        num_heads=heads,
        kernel_q=(1, 1) if stride is None else POOLING_KERNEL,
        kernel_kv=POOLING_KERNEL,
        stride_q=(stride or 1, stride or 1),
        stride_kv=(kv_stride, kv_stride),
        has_cls_token=False,
        rel_pos_type="spatial" if relative_position else "none",
        residual_pooling=residual_pooling,
        norm_layer=MULTISCALE_NORM,
    )
