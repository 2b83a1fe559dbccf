"""mmpretrain's Rev-ViT, converted by its authors from PySlowFast's.

Its code (`mmpretrain/models/backbones/revvit.py`, `tools/model_converters/revvit_to_mmpretrain.py`) adds a class token, whose
position is the first row of the position embeddings, and removes it again before the first block. Neither is needed here.
"""

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from revzoo.conversion.mapping import TensorMapping, rename
from revzoo.conversion.sources.base import Tensors
from revzoo.conversion.sources.published import PublishedSource
from revzoo.conversion.sources.tensors import resize_positions

_FAMILIES = ("rev_vit",)
_RULES = {  # from our keys, layers numbered through all stages, to theirs
    r"stem\.patch_embed\.proj\.": "backbone.patch_embed.projection.",
    r"stem\.": "backbone.",
    r"fuse\.norm\.": "backbone.ln1.",
    r"head\.linear\.": "head.fc.",
    r"layers\.(\d+)\.f\.norm\.": r"backbone.layers.\1.ln1.",
    r"layers\.(\d+)\.f\.": r"backbone.layers.\1.",
    r"layers\.(\d+)\.g\.norm\.": r"backbone.layers.\1.ln2.",
    r"layers\.(\d+)\.g\.mlp\.fc1\.": r"backbone.layers.\1.ffn.layers.0.0.",
    r"layers\.(\d+)\.g\.mlp\.fc2\.": r"backbone.layers.\1.ffn.layers.1.",
}
_POSITIONS, _TOKEN = "backbone.pos_embed", "backbone.cls_token"


class MMPretrain(PublishedSource):
    """Published checkpoints such as revvit-base_3rdparty_in1k."""

    name = "mmpretrain Rev-ViT"
    families, rules = _FAMILIES, _RULES

    def recognises(self, tensors: Tensors) -> bool:
        """Return whether a file has mmpretrain's keys."""
        return any(re.match(r"(backbone\.)?layers\.\d+\.ffn\.layers\.", key) for key in tensors)

    def ignores(self, key: str) -> bool:
        """Return whether a key is the class token's, which reaches no layer."""
        return key == _TOKEN

    def resize(self, key: str, tensor: Tensor, shape: Sequence[int]) -> Tensor | None:
        """Return position embeddings interpolated to another square grid, with the first row as it is; else None."""
        return resize_positions(tensor, shape, prefix=1) if key == _POSITIONS else None

    def canonicalise(self, description: Any, tensors: Tensors) -> tuple[dict[str, Tensor], list[str]]:
        """Return a file's tensors with the prefix that a file of the backbone alone lacks, and notes."""
        notes = ["The first row of positions is dropped: it belongs to the class token, which reaches no layer."]
        if any(key.startswith("backbone.") for key in tensors):
            return dict(tensors), notes
        return {key if key.startswith("head.") else f"backbone.{key}": tensor for key, tensor in tensors.items()}, notes

    def map_tensor(self, ours: str, theirs: str, tensor: Tensor) -> TensorMapping:
        """Return the mapping of one tensor; drops the class token's position embedding (all ones in the published files)."""
        if theirs == _POSITIONS:
            return TensorMapping((ours,), (theirs,), "reshaped", _drop_first_row, _prepend_ones)
        return rename(ours, theirs)


def _drop_first_row(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensors[0][:, 1:]]


def _prepend_ones(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [torch.cat((torch.ones_like(tensors[0][:, :1]), tensors[0]), 1)]
