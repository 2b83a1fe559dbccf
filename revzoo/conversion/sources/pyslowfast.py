"""PySlowFast's Rev-ViT and Rev-MViT for images, whose layers are counted through all stages, transitions included.

Its networks end with a softmax in eval mode, ours with logits. Read from `slowfast/models/reversible_mvit.py`,
`attention.py` and `video_model_builder.py`: streams begin as copies, are joined as (y1, y2), normed, then averaged over the
tokens, as here.
"""

import re
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from revzoo.conversion.mapping import Entry, merged, renamed, reshaped
from revzoo.conversion.sources import resize
from revzoo.conversion.sources.base import Tensors
from revzoo.conversion.sources.published import PublishedSource

_FAMILIES = ("rev_vit", "rev_mvit")
_RULES = {  # from our names, layers counted through, to theirs
    r"stem\.": "",
    r"fuse\.norm\.": "norm.",
    r"head\.linear\.": "head.projection.",
    r"layers\.(\d+)\.f\.": r"rev_backbone.layers.\1.F.",
    r"layers\.(\d+)\.g\.": r"rev_backbone.layers.\1.G.",
    r"layers\.(\d+)\.transition\.norm1\.": r"rev_backbone.layers.\1.F.norm.",
    r"layers\.(\d+)\.transition\.attn\.": r"rev_backbone.layers.\1.F.attn.",
    r"layers\.(\d+)\.transition\.norm2\.": r"rev_backbone.layers.\1.G.norm.",
    r"layers\.(\d+)\.transition\.mlp\.": r"rev_backbone.layers.\1.G.mlp.",
    r"layers\.(\d+)\.transition\.fuse\.": r"rev_backbone.layers.\1.pre_q_fuse.fuse_fn.",
    r"layers\.(\d+)\.transition\.shortcut_proj_attn\.": r"rev_backbone.layers.\1.res_proj.",
}


class PySlowFast(PublishedSource):
    """Published checkpoints such as REV_VIT_B.pyth and REV_MVIT_B.pyth; `original` names the zoo's spec of the network."""

    name = "PySlowFast Rev-ViT and Rev-MViT"
    families, rules = _FAMILIES, _RULES

    def recognises(self, tensors: Tensors) -> bool:
        """Return whether a file's keys are this source's."""
        return any(key.startswith("rev_backbone.layers.") for key in tensors)

    def resized(self, key: str, tensor: Tensor, shape: Sequence[int]) -> Tensor | None:
        """Return positions of another square grid, or distances along a side of another length, interpolated."""
        if key.endswith((".rel_pos_h", ".rel_pos_w")):
            return resize.distances(tensor, shape)
        return resize.positions(tensor, shape) if key == "pos_embed" else None

    def canonical(self, original: Any, tensors: Tensors) -> tuple[dict[str, Tensor], list[str]]:
        """Return a file's tensors under the names that `entries` has, one matrix of q, k and v split, and a note of it."""
        found: dict[str, Tensor] = {}
        for key, tensor in tensors.items():
            if ".attn.qkv." in key:
                found |= {key.replace(".qkv.", f".{name}."): t for name, t in zip("qkv", tensor.chunk(3), strict=True)}
            else:
                found[key] = tensor
        count = (len(found) - len(tensors)) // 2
        return found, [f"{count} tensors of queries, keys and values in one (SEPARATE_QKV off) were split."] if count else []

    def entry(self, ours: str, theirs: str, tensor: Tensor) -> Entry:
        """Return the way of a tensor; three matrices become one, and kernels lose the dimension of time."""
        if ".attn.qkv." in theirs:
            return merged(ours, [theirs.replace(".qkv.", f".{name}.") for name in "qkv"])
        if re.search(r"\.attn\.pool_[qkv]\.weight$", theirs):
            kernel = tensor.shape  # (C, 1, K, K); theirs has K = 1 frame in front
            return reshaped(ours, theirs, kernel, (*kernel[:2], 1, *kernel[2:]))
        return renamed(ours, theirs)
