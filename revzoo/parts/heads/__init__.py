"""Heads: from features to what the task needs. One file per head, named after it."""

from revzoo.parts.heads import (
    masked_lm,
    pooled_linear,
    sequence_classification,
    text_features,
    token_linear,
)

__all__ = [
    "masked_lm",
    "pooled_linear",
    "sequence_classification",
    "text_features",
    "token_linear",
]
