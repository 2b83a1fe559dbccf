"""Stems: from the input to the tensor that is split into two streams."""

from revzoo.parts.stems import convolution, patches, text

__all__ = ["convolution", "patches", "text"]
