"""Stems: from the input to the tensor that is split into two streams. One file per stem, named after it."""

from revzoo.parts.stems import (
    conv,
    deep_conv,
    layerwise_conv,
    overlap_patch_embed,
    pad_channels,
    patch_embed,
    resnet,
    space_to_depth,
    token_embed,
)

__all__ = [
    "conv",
    "deep_conv",
    "layerwise_conv",
    "overlap_patch_embed",
    "pad_channels",
    "patch_embed",
    "resnet",
    "space_to_depth",
    "token_embed",
]
