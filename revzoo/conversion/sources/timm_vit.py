"""timm's ViT and DeiT: attention is f, the MLP is g, every tensor keeps its value."""

import re
from collections.abc import Sequence
from typing import Any

from timm.layers import Attention, LayerScale, Mlp, PatchEmbed
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn

from revzoo.conversion.mapping import Entry
from revzoo.conversion.sources import resize
from revzoo.conversion.sources.base import Choice, Tensors
from revzoo.conversion.sources.qkv import fused
from revzoo.conversion.sources.timm_modules import activation_name, drop_path, norm_name, rate, ratio, renames, same
from revzoo.conversion.sources.timm_source import TimmSource
from revzoo.errors import ConversionError

_POOLS = {"token": "first", "avg": "mean", "max": "max"}
_RULES = {
    r"(cls_token|pos_embed|patch_embed)\b": r"stem.\1",
    r"blocks\.(\d+)\.norm1\b": r"stages.0.blocks.\1.f.norm",
    r"blocks\.(\d+)\.norm2\b": r"stages.0.blocks.\1.g.norm",
    r"blocks\.(\d+)\.(attn\b)": r"stages.0.blocks.\1.f.\2",
    r"blocks\.(\d+)\.(mlp\b)": r"stages.0.blocks.\1.g.\2",
    r"blocks\.(\d+)\.ls1\b": r"stages.0.blocks.\1.f.ls",
    r"blocks\.(\d+)\.ls2\b": r"stages.0.blocks.\1.g.ls",
    r"norm\b": "fuse.norm",
    r"head\b": "head.linear",
    r"fc_norm\b": "head.fc_norm",
}


class TimmViT(TimmSource):
    """Convert `timm.models.vision_transformer.VisionTransformer`.

    With and without class token, LayerScale and biases of queries, keys and values. Refused by name: distillation and
    register tokens, norms of queries and keys, norms in front of the blocks, pooling by attention, sizes that vary, other
    blocks.

    Source: timm `vision_transformer.py`; DeiT (Touvron et al. 2021) and DeiT III without distillation are the same class.
    """

    name = "timm ViT"
    kind = VisionTransformer

    def spec(self, original: Any, choice: Choice) -> dict[str, Any]:
        """Return the converted network's spec.

        Raises: ConversionError: something in the original that cannot be expressed; names it.
        """
        self._check(original)
        f, g = (same(self.name, "blocks", map(read, original.blocks)) for read in (self._attention, self._mlp))
        rates = [rate(block.drop_path1) for block in original.blocks]
        return {
            "family": "rev_vit",
            "input": {
                "kind": "image",
                "channels": original.patch_embed.proj.in_channels,
                "size": list(original.patch_embed.img_size),
            },
            "stem": self._stem(original),
            "split": "duplicate",
            "block": {"coupling": choice.part(residual=True), "f": f, "g": g, "drop_path": drop_path(self.name, rates)},
            "stages": [{"depth": len(original.blocks), "width": original.embed_dim}],
            "fuse": {"type": choice.fuse, "norm": norm_name(self.name, original.norm)},
            "head": self._head(original),
        }

    def canonical(self, original: Any, tensors: Tensors) -> tuple[dict[str, Tensor], list[str]]:
        """Return a file's tensors under timm's names: one matrix of queries, keys and values, LayerScale's as modules.

        Raises: ConversionError: the file has a class or a distillation token that the original has not, or lacks one.
        """
        self._refuse({"a distillation token (dist_token in the file)": "dist_token" in tensors})
        if ("cls_token" in tensors) != original.has_class_token and "patch_embed.proj.weight" in tensors:
            mismatch = (
                "no class token and the file has one" if "cls_token" in tensors else "a class token and the file has none"
            )
            raise ConversionError(
                f"The network has {mismatch} (cls_token). Name the network that the file is of, or make it with "
                "timm.create_model(..., class_token=..., global_pool=...) and convert that module."
            )
        found, notes = fused(tensors)
        scales = [key for key in found if re.search(r"\bgamma_[12]$", key)]
        for key in scales:
            found[re.sub(r"\bgamma_([12])$", r"ls\1.gamma", key)] = found.pop(key)
        told = [f"{len(scales)} factors of LayerScale were renamed (gamma_1 to ls1.gamma)"] if scales else []
        return found, [*notes, *told]

    def entries(self, original: Any) -> Sequence[Entry]:
        """Return where every tensor goes."""
        return renames(self.name, original.state_dict(), _RULES)

    def ignored(self, key: str) -> bool:
        """Return whether a key is of the layer in front of old checkpoints' heads, which timm drops as well."""
        return key.startswith("pre_logits.")

    def resized(self, key: str, tensor: Tensor, shape: Sequence[int]) -> Tensor | None:
        """Return positional embeddings of another square grid, interpolated as timm does, or None."""
        if key != "pos_embed":
            return None
        found = (resize.positions(tensor, shape, prefix) for prefix in (0, 1))  # rows of the class token: only one can fit
        return next((resized for resized in found if resized is not None), None)

    def _check(self, vit: VisionTransformer) -> None:
        kind, embed = type(vit), vit.patch_embed
        self._refuse({"a distillation token": hasattr(vit, "dist_token")})
        self._refuse({f"the class {kind.__name__}": kind is not VisionTransformer})
        self._refuse({f"the patch embedding {type(embed).__name__}": type(embed) is not PatchEmbed})
        self._refuse({f"blocks of class {type(block).__name__}": type(block) is not Block for block in vit.blocks})
        sizes, patch = embed.img_size or (), embed.patch_size
        self._refuse(
            {
                f"register tokens (reg_tokens={vit.num_reg_tokens})": vit.num_reg_tokens,
                "no image size": not sizes,
                "padded images (dynamic_img_pad)": embed.dynamic_img_pad,
                f"oblong patches (patch_size {patch})": patch[0] != patch[1],
                f"an image that patches do not cover (img_size {sizes})": any(side % patch[0] for side in sizes),
                "a patch embedding without bias": embed.proj.bias is None,
                "a norm in front of the blocks (pre_norm)": not isinstance(vit.norm_pre, nn.Identity),
                f"pooling {vit.global_pool!r} (global_pool)": vit.global_pool not in {*_POOLS, ""},
                "a norm behind the pooling of none (fc_norm)": not vit.global_pool and not isinstance(vit.fc_norm, nn.Identity),
                "no classifier (num_classes=0; with num_classes=N it starts fresh)": not isinstance(vit.head, nn.Linear),
                "pos_drop_rate": rate(vit.pos_drop),
                "patch_drop_rate": not isinstance(vit.patch_drop, nn.Identity),
            }
        )

    def _stem(self, vit: VisionTransformer) -> dict[str, Any]:
        positioned = vit.pos_embed is not None
        return {
            "type": "patch_embed",
            "width": vit.embed_dim,
            "patch": vit.patch_embed.patch_size[0],
            "norm": self._stem_norm(vit.patch_embed.norm),
            "class_token": vit.has_class_token,
            "position": ("patches" if vit.has_class_token and vit.no_embed_class else "learned") if positioned else "none",
        }

    def _stem_norm(self, norm: nn.Module) -> str:
        name = norm_name(self.name, norm)
        self._refuse({f"the patch embedding's norm {norm} (not one of eps 1e-5)": name == "layer_norm"})
        return name

    def _head(self, vit: VisionTransformer) -> dict[str, Any]:
        if not vit.global_pool:
            self._refuse({"drop_rate in front of a classifier of tokens": rate(vit.head_drop)})
            return {"type": "token_linear", "norm": "none", "outputs": vit.num_classes}
        return {
            "type": "pooled_linear",
            "pool": _POOLS[vit.global_pool],
            "class_token": vit.has_class_token and vit.global_pool != "token" and not vit.pool_include_prefix,
            "fc_norm": norm_name(self.name, vit.fc_norm),
            "dropout": rate(vit.head_drop),
            "outputs": vit.num_classes,
        }

    def _attention(self, block: Any) -> dict[str, Any]:
        attn, scaled = block.attn, isinstance(block.ls1, LayerScale)
        self._refuse({f"attention of class {type(attn).__name__}": type(attn) is not Attention})
        width = attn.qkv.in_features
        self._refuse(
            {
                "qk_norm": not isinstance(attn.q_norm, nn.Identity),
                "a norm of what attention returns (scale_attn_norm)": not isinstance(attn.norm, nn.Identity),
                "a gate in the attention (gated)": getattr(attn, "gate", None) is not None,
                f"heads of another width (attn_head_dim {attn.head_dim})": attn.head_dim * attn.num_heads != width,
                "an attention without bias of its last layer (proj_bias)": attn.proj.bias is None,
                "attn_drop_rate": rate(attn.attn_drop),
                "proj_drop_rate": rate(attn.proj_drop),
                "a scale behind the attention that is no LayerScale": not (scaled or isinstance(block.ls1, nn.Identity)),
            }
        )
        norm = norm_name(self.name, block.norm1)
        part = {"type": "attention", "heads": attn.num_heads, "norm": norm, "qkv_bias": attn.qkv.bias is not None}
        return {**part, "layer_scale": scaled}

    def _mlp(self, block: Any) -> dict[str, Any]:
        mlp, scaled = block.mlp, isinstance(block.ls2, LayerScale)
        self._refuse({f"an MLP of class {type(mlp).__name__}": type(mlp) is not Mlp})
        self._refuse(
            {
                "a norm inside the MLP (scale_mlp_norm)": not isinstance(mlp.norm, nn.Identity),
                "an MLP without biases (proj_bias)": mlp.fc1.bias is None or mlp.fc2.bias is None,
                "proj_drop_rate": rate(mlp.drop1) or rate(mlp.drop2),
                "a scale behind the MLP that is no LayerScale": not (scaled or isinstance(block.ls2, nn.Identity)),
                "drop path rates that differ in a block": rate(block.drop_path1) != rate(block.drop_path2),
            }
        )
        hidden, width = mlp.fc1.out_features, mlp.fc1.in_features
        act, norm = activation_name(self.name, mlp.act), norm_name(self.name, block.norm2)
        return {"type": "mlp", "ratio": ratio(hidden, width), "act": act, "norm": norm, "layer_scale": scaled}
