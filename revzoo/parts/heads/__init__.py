"""Heads: from features to what the task needs."""

from revzoo.parts.heads import pooled_linear, text

__all__ = ["pooled_linear", "text"]
