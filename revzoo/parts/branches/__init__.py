"""Branches: f and g of a reversible step, without residual, which the coupling adds. One file per branch, named after it."""

from revzoo.parts.branches import (
    attention,
    chunked_mlp,
    conv_unit,
    feed_forward,
    irevnet_unit,
    layerwise_unit,
    lsh_attention,
    mlp,
    pooling_attention,
    preactivated_block,
    residual_unit,
    self_attention,
    shared_qk_attention,
    window_attention,
)

__all__ = [
    "attention",
    "chunked_mlp",
    "conv_unit",
    "feed_forward",
    "irevnet_unit",
    "layerwise_unit",
    "lsh_attention",
    "mlp",
    "pooling_attention",
    "preactivated_block",
    "residual_unit",
    "self_attention",
    "shared_qk_attention",
    "window_attention",
]
