"""The parts a spec can name. Importing this package fills the registries.

A part knows nothing of modes, streams' partners or schedules; attention, MLP, norms, drop path and patch embedding are
timm's, with timm's parameter names; parts for texts have those of Transformers.
"""

from revzoo.parts import (
    attention,
    chunk,
    conv,
    embedding,
    encoder,
    fuse,
    head,
    init,
    irevnet,
    lsh,
    merge,
    mlp,
    mvit,
    pooling,
    resnet,
    split,
    stem,
    text_head,
    token_head,
    transition,
    window,
)
from revzoo.parts.context import BuildContext, Shape

__all__ = [
    "BuildContext",
    "Shape",
    "attention",
    "chunk",
    "conv",
    "embedding",
    "encoder",
    "fuse",
    "head",
    "init",
    "irevnet",
    "lsh",
    "merge",
    "mlp",
    "mvit",
    "pooling",
    "resnet",
    "split",
    "stem",
    "text_head",
    "token_head",
    "transition",
    "window",
]
