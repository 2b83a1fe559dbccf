"""mmpretrain's Rev-ViT, converted by its authors from PySlowFast's.

Read from `mmpretrain/models/backbones/revvit.py` and `tools/model_converters/revvit_to_mmpretrain.py`: there is a class token
and a first row of positions that belongs to it, both taken off again in front of the first block, so neither is of use here.
"""

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from revzoo.conversion.mapping import Entry, renamed
from revzoo.conversion.sources import resize
from revzoo.conversion.sources.base import Tensors
from revzoo.conversion.sources.published import PublishedSource

_FAMILIES = ("rev_vit",)
_RULES = {  # from our names, layers counted through, to theirs
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
    """Published checkpoints such as revvit-base_3rdparty_in1k; `original` names the zoo's spec of the network."""

    name = "mmpretrain Rev-ViT"
    families, rules = _FAMILIES, _RULES

    def recognises(self, tensors: Tensors) -> bool:
        """Return whether a file's keys are this source's."""
        return any(re.match(r"(backbone\.)?layers\.\d+\.ffn\.layers\.", key) for key in tensors)

    def ignored(self, key: str) -> bool:
        """Return whether a key is the class token's, which reaches no layer."""
        return key == _TOKEN

    def resized(self, key: str, tensor: Tensor, shape: Sequence[int]) -> Tensor | None:
        """Return positions of another square grid, interpolated, their first row as it is."""
        return resize.positions(tensor, shape, prefix=1) if key == _POSITIONS else None

    def canonical(self, original: Any, tensors: Tensors) -> tuple[dict[str, Tensor], list[str]]:
        """Return a file's tensors under the names that `entries` has, and notes; a file of the backbone alone has no prefix."""
        notes = ["The first row of positions is dropped: it is of a class token, which reaches no layer."]
        if any(key.startswith("backbone.") for key in tensors):
            return dict(tensors), notes
        return {key if key.startswith("head.") else f"backbone.{key}": tensor for key, tensor in tensors.items()}, notes

    def entry(self, ours: str, theirs: str, tensor: Tensor) -> Entry:
        """Return the way of a tensor; the first row of positions is dropped, and is all ones in their files."""
        if theirs == _POSITIONS:
            return Entry((ours,), (theirs,), "reshaped", _without_first, _with_first)
        return renamed(ours, theirs)


def _without_first(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensors[0][:, 1:]]


def _with_first(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [torch.cat((torch.ones_like(tensors[0][:, :1]), tensors[0]), 1)]
