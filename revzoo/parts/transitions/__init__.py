"""Transitions change width or size of both streams between stages. One file per transition, named after it."""

from revzoo.parts.transitions import (
    downsampling_block,
    fuse_merge_split,
    fuse_pool_split,
    multiscale_block,
    pixel_unshuffle,
    preactivated_block,
    residual_block,
    residual_pair,
    space_to_depth,
)

__all__ = [
    "downsampling_block",
    "fuse_merge_split",
    "fuse_pool_split",
    "multiscale_block",
    "pixel_unshuffle",
    "preactivated_block",
    "residual_block",
    "residual_pair",
    "space_to_depth",
]
