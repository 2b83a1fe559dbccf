"""timm's Swin, and Microsoft's files: window attention becomes f, the MLP becomes g, and every tensor keeps its values."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from timm.layers import ClassifierHead, Mlp
from timm.models.swin_transformer import PatchMerging, SwinTransformer, SwinTransformerBlock, WindowAttention
from torch import Tensor, nn

from revzoo.conversion.choice import CouplingChoice
from revzoo.conversion.mapping import TensorMapping
from revzoo.conversion.sources.base import Tensors, find_mlp_ratio
from revzoo.conversion.sources.tensors import GridSize, merge_qkv
from revzoo.conversion.sources.timm_base import TimmSource, read_rate
from revzoo.parts.layers.position import resize_biases

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
_MICROSOFT = "layers.0.downsample.reduction.weight"  # timm has no downsampling before its first layer
_BUFFERS = ("attn_mask", "relative_position_index")


def rename_microsoft_keys(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a state dict of Microsoft's Swin under timm's names; any other state dict stays as it is.

    In Microsoft's code a patch merging ends a layer, in timm it begins the next one; the classifier has another name, too.
    Attention masks and indices are in the file; they are constants and are left out.

    Source: timm `swin_transformer.py`, checkpoint_filter_fn.
    """
    if _MICROSOFT not in tensors:
        return dict(tensors)
    kept = {key: tensor for key, tensor in tensors.items() if not key.endswith(_BUFFERS)}
    return {re.sub(r"^head\.(?!fc\.)", "head.fc.", _move_downsampling(key)): tensor for key, tensor in kept.items()}


def _move_downsampling(key: str) -> str:
    """Return a key, with the downsampling of a layer moved to the next layer."""
    return re.sub(r"^layers\.(\d+)\.downsample", lambda match: f"layers.{int(match[1]) + 1}.downsample", key)


class TimmSwin(TimmSource):
    """Convert `timm.models.swin_transformer.SwinTransformer` (version 1), with timm's weights or Microsoft's files.

    Refused by name: windows that are oblong, do not divide the grid, or are shifted although they cover it
    (always_partition); heads of another width; variable image sizes.
    """

    name = "timm Swin"
    network_class, block_classes, family = SwinTransformer, (SwinTransformerBlock,), "rev_swin"

    def canonicalise(self, network: Any, tensors: Tensors) -> tuple[dict[str, Tensor], list[str]]:
        """Return a file's tensors under timm's names, also those of a file of Microsoft, and notes on what was changed."""
        renamed, notes = merge_qkv(rename_microsoft_keys(tensors))
        if _MICROSOFT in tensors:
            notes.insert(0, "Microsoft's names became timm's: the patch merging at a layer's end now begins the next layer")
        return renamed, notes

    def map_tensors(self, network: Any) -> Sequence[TensorMapping]:
        """Return the mapping of every tensor."""
        return self._rename_keys(network.state_dict(), _RULES)

    def ignores(self, key: str) -> bool:
        """Return whether a key belongs to an attention mask or index, which some files hold."""
        return key.endswith(_BUFFERS)

    def resize(self, key: str, tensor: Tensor, shape: Sequence[int], grid: GridSize | None = None) -> Tensor | None:
        """Return position biases interpolated to another square window as timm does; None for another tensor."""
        return resize_biases(tensor, shape) if key.endswith("relative_position_bias_table") else None

    def check(self, swin: Any) -> None:
        """Raise ConversionError for stems, merging and pooling that a spec does not have."""
        self._require_patches(swin.patch_embed)
        self._refuse({f"a head of class {type(swin.head).__name__}": type(swin.head) is not ClassifierHead})
        self._require_classifier(swin.head.fc)
        pooling = swin.head.global_pool.pool_type  # swin.global_pool may differ from it after reset_classifier
        first, *merges = [layer.downsample for layer in swin.layers]
        merging = isinstance(first, nn.Identity) and all(isinstance(merge, PatchMerging) for merge in merges)
        self._refuse(
            {
                "variable image sizes (strict_img_size=False)": not swin.patch_embed.strict_img_size,
                "layers that do not merge patches at their beginning": not merging,
                f"pooling {pooling!r} (global_pool)": pooling not in _POOLS,
            }
        )
        kinds = {self._name_norm(norm) for norm in (swin.patch_embed.norm, *(merge.norm for merge in merges))}
        self._refuse({"norms of patches whose eps is not 1e-5": kinds != {"layer_norm_1e-5"}})

    def list_blocks(self, swin: Any) -> list[Any]:
        """Return every block."""
        return [block for layer in swin.layers for block in layer.blocks]

    def find_input(self, swin: Any) -> tuple[nn.Conv2d, Sequence[int]]:
        """Return the first convolution, and height and width of images."""
        return swin.patch_embed.proj, swin.patch_embed.img_size

    def describe_stem(self, swin: Any) -> dict[str, Any]:
        """Return the spec of the patch embedding."""
        patch, norm = swin.patch_embed.patch_size[0], self._name_norm(swin.patch_embed.norm)
        return {"type": "patch_embed", "patch": patch, "norm": norm, "position": "none"}

    def describe_stages(self, swin: Any, choice: CouplingChoice) -> list[dict[str, Any]]:
        """Return the spec of every layer, whose merging of patches is a transition."""
        return [self._describe_stage(layer, choice) for layer in swin.layers]

    def describe_head(self, swin: Any) -> dict[str, Any]:
        """Return the spec of the pooling and the classifier."""
        pool, dropout = _POOLS[swin.head.global_pool.pool_type], read_rate(swin.head.drop)
        return {"type": "pooled_linear", "pool": pool, "dropout": dropout, "outputs": swin.num_classes}

    def _describe_stage(self, layer: Any, choice: CouplingChoice) -> dict[str, Any]:
        sides = layer.input_resolution
        merges = isinstance(layer.downsample, PatchMerging)
        uneven = merges and any(side % 2 for side in sides)
        self._refuse({f"the merging of patches on a grid of odd sides ({sides[0]}x{sides[1]})": uneven})
        parts = [
            (self._describe_attention(block, index), self._describe_mlp(block)) for index, block in enumerate(layer.blocks)
        ]
        stage = {
            "depth": len(layer.blocks),
            "width": layer.blocks[0].dim,
            "f": self._require_same("blocks of a layer", (f for f, _ in parts)),
            "g": self._require_same("blocks of a layer", (g for _, g in parts)),
        }
        transition = {"type": "fuse_merge_split", "fuse": choice.fuse, "down": "patch_merging"}
        return {**stage, "transition": transition} if merges else stage

    def _describe_attention(self, block: Any, index: int) -> dict[str, Any]:
        attn, window, shift, grid = block.attn, block.window_size, block.shift_size, block.input_resolution
        self._refuse({f"attention of class {type(attn).__name__}": type(attn) is not WindowAttention})
        side = max(window)
        shifts = tuple(k // 2 if index % 2 and length > side else 0 for k, length in zip(window, grid, strict=True))
        heads = attn.num_heads
        self._refuse(
            {
                "always_partition": block.always_partition,
                "masks that are computed for each image size (dynamic_mask)": block.dynamic_mask,
                f"oblong windows (window_size {window})": any(
                    k != min(side, length) for k, length in zip(window, grid, strict=True)
                ),
                f"windows that do not divide the grid ({window[0]}x{window[1]} on {grid[0]}x{grid[1]})": any(
                    length % k for k, length in zip(window, grid, strict=True)
                ),
                f"windows shifted by {shift} instead of {shifts}": tuple(shift) != shifts,
                f"heads of another width (head_dim {attn.qkv.out_features // 3 // heads})": attn.qkv.out_features
                != 3 * block.dim,
                "attn_drop_rate": read_rate(attn.attn_drop),
                "proj_drop_rate": read_rate(attn.proj_drop),
            }
        )
        bias, norm = attn.qkv.bias is not None, self._name_norm(block.norm1)
        return {"type": "window_attention", "heads": heads, "window": side, "norm": norm, "qkv_bias": bias}

    def _describe_mlp(self, block: Any) -> dict[str, Any]:
        mlp = block.mlp
        self._refuse({f"an MLP of class {type(mlp).__name__}": type(mlp) is not Mlp})
        self._refuse(
            {
                "proj_drop_rate": read_rate(mlp.drop1) or read_rate(mlp.drop2),
                "drop path rates that differ in a block": read_rate(block.drop_path1) != read_rate(block.drop_path2),
            }
        )
        size = find_mlp_ratio(mlp.fc1.out_features, mlp.fc1.in_features)
        act, norm = self._name_activation(mlp.act), self._name_norm(block.norm2)
        return {"type": "mlp", "ratio": size, "act": act, "norm": norm}
