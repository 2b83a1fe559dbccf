"""mmpretrain's Rev-ViT, converted by its authors from PySlowFast's.

There are two layouts. Until 1.0.0rc6 its code (`mmcls/models/backbones/revvit.py`) added a class token, whose position is the
first row of the position embeddings, and removed it again before the first block; neither is needed here. Since 1.0.0rc7
(`mmpretrain/models/backbones/revvit.py`) there is no class token unless asked for, and one position per patch.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from math import isqrt
from typing import Any

from torch import Tensor

from revzoo.conversion.mapping import TensorMapping, rename
from revzoo.conversion.sources.base import Tensors
from revzoo.conversion.sources.published import PublishedNetwork, PublishedSource
from revzoo.conversion.sources.tensors import GridSize, resize_positions

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
    families, head, rules = _FAMILIES, "head.fc.bias", _RULES

    def recognises(self, tensors: Tensors) -> bool:
        """Return whether a file has mmpretrain's keys."""
        return any(re.match(r"(backbone\.)?layers\.\d+\.ffn\.layers\.", key) for key in tensors)

    def ignores(self, key: str) -> bool:
        """Return whether a key is the class token's, which reaches no layer."""
        return key == _TOKEN

    def complete(self, description: Any, tensors: Tensors) -> PublishedNetwork:
        """Return the network that a file has; its class token or number of positions says which layout it is."""
        positions = next((tensor for key, tensor in tensors.items() if key.endswith("pos_embed")), None)
        has_token = any(key.endswith("cls_token") for key in tensors)
        if positions is not None and positions.dim() == 3 and not has_token:
            has_token = not _is_square(positions.shape[1]) and _is_square(positions.shape[1] - 1)
        network = super().complete(description, tensors)
        if not has_token:
            return replace(network, has_class_token=False)
        note = "The first row of positions is dropped: it belongs to the class token, which reaches no layer."
        return replace(network, notes=(*network.notes, note))

    def resize(self, key: str, tensor: Tensor, shape: Sequence[int], grid: GridSize | None = None) -> Tensor | None:
        """Return positions of a square grid interpolated to another grid, with a class token's row as it is; else None."""
        prefix = 0 if tensor.dim() == 3 and _is_square(tensor.shape[1]) else 1
        return resize_positions(tensor, shape, prefix, grid) if key == _POSITIONS else None

    def canonicalise(self, description: Any, tensors: Tensors) -> tuple[dict[str, Tensor], list[str]]:
        """Return a file's tensors with the prefix that a file of the backbone alone lacks, and notes."""
        _, notes = super().canonicalise(description, tensors)
        if any(key.startswith("backbone.") for key in tensors):
            return dict(tensors), notes
        return {key if key.startswith("head.") else f"backbone.{key}": tensor for key, tensor in tensors.items()}, notes

    def map_tensor(self, ours: str, theirs: str, tensor: Tensor, description: Any) -> TensorMapping:
        """Return the mapping of one tensor; drops the class token's position embedding (all ones in the published files)."""
        if theirs == _POSITIONS and (not isinstance(description, PublishedNetwork) or description.has_class_token):
            return TensorMapping((ours,), (theirs,), "shortened")
        return rename(ours, theirs)


def _is_square(number: int) -> bool:
    return number > 0 and isqrt(number) ** 2 == number
