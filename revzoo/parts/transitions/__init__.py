"""Transitions change width or size of both streams between stages."""

from revzoo.parts.transitions import bijective, fuse_merge_split, fuse_pool_split, multiscale_block, residual

__all__ = ["bijective", "fuse_merge_split", "fuse_pool_split", "multiscale_block", "residual"]
