"""timm's Swin, and Microsoft's: window attention is f, the MLP is g, every tensor keeps its value."""

import re
import warnings
from collections.abc import Mapping, Sequence
from math import isqrt
from typing import Any

from timm.layers import ClassifierHead, Mlp, PatchEmbed, resize_rel_pos_bias_table
from timm.models.swin_transformer import PatchMerging, SwinTransformer, SwinTransformerBlock, WindowAttention
from torch import Tensor, nn

from revzoo.conversion.mapping import Entry
from revzoo.conversion.sources.base import Choice, Tensors
from revzoo.conversion.sources.qkv import fused
from revzoo.conversion.sources.timm_modules import activation_name, drop_path, norm_name, rate, ratio, renames, same
from revzoo.conversion.sources.timm_source import TimmSource

_POOLS = {"avg": "mean", "max": "max"}
_BLOCK = r"layers\.(\d+)\.blocks\.(\d+)\."
_RULES = {
    r"patch_embed\b": "stem.patch_embed",
    r"layers\.(\d+)\.downsample\b": r"stages.\1.transition.down",
    rf"{_BLOCK}norm1\b": r"stages.\1.blocks.\2.f.norm",
    rf"{_BLOCK}norm2\b": r"stages.\1.blocks.\2.g.norm",
    rf"{_BLOCK}attn\b": r"stages.\1.blocks.\2.f.attn",
    rf"{_BLOCK}mlp\b": r"stages.\1.blocks.\2.g.mlp",
    r"norm\b": "fuse.norm",
    r"head\.fc\b": "head.linear",
}
_MICROSOFT = "layers.0.downsample.reduction.weight"  # timm has no downsampling in front of its first layer
_BUFFERS = ("attn_mask", "relative_position_index")


def microsoft(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a state dict of Microsoft's Swin under timm's names, and any other as it is.

    There a layer ends with the merging of patches that timm's next one begins with, the classifier has another name, and
    masks and indices, which are constants, are in the file.

    Source: timm `swin_transformer.py`, checkpoint_filter_fn.
    """
    if _MICROSOFT not in tensors:
        return dict(tensors)
    kept = {key: tensor for key, tensor in tensors.items() if not key.endswith(_BUFFERS)}
    return {re.sub(r"^head\.(?!fc\.)", "head.fc.", _later(key)): tensor for key, tensor in kept.items()}


def _later(key: str) -> str:
    """Return a key with a layer's downsampling moved to the next one."""
    return re.sub(r"^layers\.(\d+)\.downsample", lambda found: f"layers.{int(found[1]) + 1}.downsample", key)


class TimmSwin(TimmSource):
    """Convert `timm.models.swin_transformer.SwinTransformer` (version 1); for Microsoft's files see `microsoft`.

    Refused by name: windows that are oblong or do not divide the grid, that are shifted although they cover it
    (always_partition), heads of another width, sizes that vary.
    """

    name = "timm Swin"
    kind = SwinTransformer

    def spec(self, original: Any, choice: Choice) -> dict[str, Any]:
        """Return the converted network's spec.

        Raises: ConversionError: something in the original that cannot be expressed; names it.
        """
        self._check(original)
        rates = [rate(block.drop_path1) for layer in original.layers for block in layer.blocks]
        stages = [self._stage(layer, choice) for layer in original.layers]
        shared = stages[0]
        return {
            "family": "rev_swin",
            "input": {
                "kind": "image",
                "channels": original.patch_embed.proj.in_channels,
                "size": list(original.patch_embed.img_size),
            },
            "stem": {
                "type": "patch_embed",
                "width": original.patch_embed.proj.out_channels,
                "patch": original.patch_embed.patch_size[0],
                "norm": norm_name(self.name, original.patch_embed.norm),
                "position": "none",
            },
            "split": "duplicate",
            "block": {
                "coupling": choice.part(residual=True),
                "f": shared["f"],
                "g": shared["g"],
                "drop_path": drop_path(self.name, rates),
            },
            "stages": stages,
            "fuse": {"type": choice.fuse, "norm": norm_name(self.name, original.norm)},
            "head": {
                "type": "pooled_linear",
                "pool": _POOLS[original.global_pool],
                "dropout": rate(original.head.drop),
                "outputs": original.num_classes,
            },
        }

    def canonical(self, original: Any, tensors: Tensors) -> tuple[dict[str, Tensor], list[str]]:
        """Return a file's tensors under timm's names, Microsoft's as well, and what was done to them, in words."""
        found, notes = fused(microsoft(tensors))
        told = "Microsoft's names became timm's: a layer's merging of patches is in front of the next one's blocks"
        return found, [*([told] if _MICROSOFT in tensors else []), *notes]

    def entries(self, original: Any) -> Sequence[Entry]:
        """Return where every tensor goes."""
        return renames(self.name, original.state_dict(), _RULES)

    def ignored(self, key: str) -> bool:
        """Return whether a key is a mask's or an index's, which some files hold."""
        return key.endswith(_BUFFERS)

    def resized(self, key: str, tensor: Tensor, shape: Sequence[int]) -> Tensor | None:
        """Return the biases of another square window, interpolated as timm does, or None."""
        if not key.endswith("relative_position_bias_table") or tensor.ndim != 2 or tensor.shape[1] != shape[1]:
            return None
        sides = isqrt(len(tensor)), isqrt(shape[0])
        if (sides[0] ** 2, sides[1] ** 2) != (len(tensor), shape[0]) or not sides[0] % 2 or not sides[1] % 2:
            return None
        with warnings.catch_warnings():  # torch notes, once, that timm hands it strided numbers
            warnings.simplefilter("ignore")
            resampled: Tensor = resize_rel_pos_bias_table(tensor, ((sides[1] + 1) // 2,) * 2, tuple(shape))
        return resampled

    def _check(self, swin: Any) -> None:
        embed = swin.patch_embed
        self._refuse({f"the class {type(swin).__name__}": type(swin) is not SwinTransformer})
        self._refuse({f"the patch embedding {type(embed).__name__}": type(embed) is not PatchEmbed})
        self._refuse({f"a head of class {type(swin.head).__name__}": type(swin.head) is not ClassifierHead})
        sizes, patch = embed.img_size or (), embed.patch_size
        merges = [layer.downsample for layer in swin.layers]
        norms = [embed.norm, *(merge.norm for merge in merges if isinstance(merge, PatchMerging))]
        self._refuse(
            {
                "sizes that vary (strict_img_size=False)": swin.dynamic_img_size or not embed.strict_img_size or not sizes,
                f"oblong patches (patch_size {patch})": patch[0] != patch[1],
                f"an image that patches do not cover (img_size {sizes})": any(side % patch[0] for side in sizes),
                "layers that do not merge patches at their beginning": not isinstance(merges[0], nn.Identity)
                or not all(isinstance(merge, PatchMerging) for merge in merges[1:]),
                f"pooling {swin.global_pool!r} (global_pool)": swin.global_pool not in _POOLS,
                "no classifier (num_classes=0; with num_classes=N it starts fresh)": not isinstance(swin.head.fc, nn.Linear),
            }
        )
        kinds = {norm_name(self.name, norm) for norm in norms}
        self._refuse({"norms of patches whose eps is not 1e-5": kinds != {"layer_norm_1e-5"}})

    def _stage(self, layer: Any, choice: Choice) -> dict[str, Any]:
        sides = layer.input_resolution
        merges = isinstance(layer.downsample, PatchMerging)
        uneven = merges and any(side % 2 for side in sides)
        self._refuse({f"the merging of patches on a grid of odd sides ({sides[0]}x{sides[1]})": uneven})
        parts = [(self._attention(block, index), self._mlp(block)) for index, block in enumerate(layer.blocks)]
        stage = {
            "depth": len(layer.blocks),
            "width": layer.blocks[0].dim,
            "f": same(self.name, "blocks of a layer", (f for f, _ in parts)),
            "g": same(self.name, "blocks of a layer", (g for _, g in parts)),
        }
        transition = {"type": "fuse_merge_split", "fuse": choice.fuse, "down": "patch_merging"}
        return {**stage, "transition": transition} if merges else stage

    def _attention(self, block: Any, index: int) -> dict[str, Any]:
        self._refuse({f"blocks of class {type(block).__name__}": type(block) is not SwinTransformerBlock})
        attn, window, shift, grid = block.attn, block.window_size, block.shift_size, block.input_resolution
        self._refuse({f"attention of class {type(attn).__name__}": type(attn) is not WindowAttention})
        side = max(window)
        shifts = tuple(k // 2 if index % 2 and length > side else 0 for k, length in zip(window, grid, strict=True))
        heads = attn.num_heads
        self._refuse(
            {
                "always_partition": block.always_partition,
                "masks made for every size (dynamic_mask)": block.dynamic_mask,
                f"oblong windows (window_size {window})": any(
                    k != min(side, length) for k, length in zip(window, grid, strict=True)
                ),
                f"windows that do not divide the grid ({window[0]}x{window[1]} on {grid[0]}x{grid[1]})": any(
                    length % k for k, length in zip(window, grid, strict=True)
                ),
                f"windows shifted by {shift} instead of {shifts}": tuple(shift) != shifts,
                f"heads of another width (head_dim {attn.qkv.out_features // 3 // heads})": attn.qkv.out_features
                != 3 * block.dim,
                "attn_drop_rate": rate(attn.attn_drop),
                "proj_drop_rate": rate(attn.proj_drop),
            }
        )
        bias, norm = attn.qkv.bias is not None, norm_name(self.name, block.norm1)
        return {"type": "window_attention", "heads": heads, "window": side, "norm": norm, "qkv_bias": bias}

    def _mlp(self, block: Any) -> dict[str, Any]:
        mlp = block.mlp
        self._refuse({f"an MLP of class {type(mlp).__name__}": type(mlp) is not Mlp})
        self._refuse(
            {
                "proj_drop_rate": rate(mlp.drop1) or rate(mlp.drop2),
                "drop path rates that differ in a block": rate(block.drop_path1) != rate(block.drop_path2),
            }
        )
        size = ratio(mlp.fc1.out_features, mlp.fc1.in_features)
        act, norm = activation_name(self.name, mlp.act), norm_name(self.name, block.norm2)
        return {"type": "mlp", "ratio": size, "act": act, "norm": norm}
