"""PySlowFast's Rev-ViT and Rev-MViT for images, whose layers are numbered through all stages, transitions included.

As here, both streams begin as the same tensor, and (y1, y2) is normed and then averaged over the tokens
(`slowfast/models/reversible_mvit.py`, `attention.py`, `video_model_builder.py`). In eval mode PySlowFast's networks end with a
softmax, ours with logits.
"""

import re
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from revzoo.conversion.mapping import TensorMapping, rename
from revzoo.conversion.sources.base import Tensors
from revzoo.conversion.sources.published import PublishedSource
from revzoo.conversion.sources.tensors import GridSize, resize_positions
from revzoo.parts.layers.position import resize_distances

_FAMILIES = ("rev_vit", "rev_mvit")
_RULES = {  # from our keys, layers numbered through all stages, to theirs
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
    """Published checkpoints such as REV_VIT_B.pyth and REV_MVIT_B.pyth."""

    name = "PySlowFast Rev-ViT and Rev-MViT"
    families, head, rules = _FAMILIES, "head.projection.bias", _RULES

    def recognises(self, tensors: Tensors) -> bool:
        """Return whether a file has PySlowFast's keys."""
        return any(key.startswith("rev_backbone.layers.") for key in tensors)

    def resize(self, key: str, tensor: Tensor, shape: Sequence[int], grid: GridSize | None = None) -> Tensor | None:
        """Return positions of a square grid interpolated to another grid, absolute or relative; None for another tensor."""
        if key.endswith((".rel_pos_h", ".rel_pos_w")):
            return resize_distances(tensor, shape)
        return resize_positions(tensor, shape, grid=grid) if key == "pos_embed" else None

    def map_tensor(self, ours: str, theirs: str, tensor: Tensor, description: Any) -> TensorMapping:
        """Return the mapping of one tensor: q, k and v become one matrix, and kernels lose the dimension of time."""
        if ".attn.qkv." in theirs:
            return TensorMapping((ours,), tuple(theirs.replace(".qkv.", f".{name}.") for name in "qkv"), "merged")
        if re.search(r"\.attn\.pool_[qkv]\.weight$", theirs):
            kernel = tensor.shape  # (C, 1, K, K); theirs is (C, 1, 1, K, K), over a single frame
            return TensorMapping((ours,), (theirs,), "reshaped", tuple(kernel), ((*kernel[:2], 1, *kernel[2:]),))
        return rename(ours, theirs)
