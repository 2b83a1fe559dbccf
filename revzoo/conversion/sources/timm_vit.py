"""timm's ViT and DeiT: attention becomes f, the MLP becomes g, and every tensor keeps its values."""

import re
from collections.abc import Sequence
from typing import Any

from timm.layers import Attention, LayerScale, Mlp
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn

from revzoo.conversion.choice import CouplingChoice
from revzoo.conversion.mapping import TensorMapping
from revzoo.conversion.sources.base import Tensors, find_mlp_ratio
from revzoo.conversion.sources.tensors import GridSize, merge_qkv, resize_positions
from revzoo.conversion.sources.timm_base import TimmSource, read_rate
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

    Networks with and without a class token, LayerScale and biases of queries, keys and values. Refused by name: distillation
    and register tokens, norms of queries and keys, a norm before the blocks, pooling by attention, variable image sizes,
    other blocks.

    Source: timm `vision_transformer.py`; DeiT (Touvron et al. 2021) and DeiT III without distillation are the same class.
    """

    name = "timm ViT"
    network_class, block_classes, family = VisionTransformer, (Block,), "rev_vit"

    def canonicalise(self, network: Any, tensors: Tensors) -> tuple[dict[str, Tensor], list[str]]:
        """Return a file's tensors under timm's names: one matrix for queries, keys and values; gamma_1 as ls1.gamma.

        Raises: ConversionError: only one of network and file has a class token, or the file has a distillation token.
        """
        self._refuse({"a distillation token (dist_token in the file)": "dist_token" in tensors})
        if ("cls_token" in tensors) != network.has_class_token and "patch_embed.proj.weight" in tensors:
            mismatch = (
                "no class token and the file has one" if "cls_token" in tensors else "a class token and the file has none"
            )
            raise ConversionError(
                f"The network has {mismatch} (cls_token). Name the network that the file belongs to, or make it with "
                "timm.create_model(..., class_token=..., global_pool=...) and convert that module."
            )
        renamed, notes = merge_qkv(tensors)
        scales = [key for key in renamed if re.search(r"\bgamma_[12]$", key)]
        for key in scales:
            renamed[re.sub(r"\bgamma_([12])$", r"ls\1.gamma", key)] = renamed.pop(key)
        if scales:
            notes.append(f"{len(scales)} factors of LayerScale were renamed (gamma_1 to ls1.gamma)")
        return renamed, notes

    def map_tensors(self, network: Any) -> Sequence[TensorMapping]:
        """Return the mapping of every tensor."""
        return self._rename_keys(network.state_dict(), _RULES)

    def ignores(self, key: str) -> bool:
        """Return whether a key belongs to the layer before the head of old checkpoints, which timm drops as well."""
        return key.startswith("pre_logits.")

    def resize(self, key: str, tensor: Tensor, shape: Sequence[int], grid: GridSize | None = None) -> Tensor | None:
        """Return position embeddings of a square grid interpolated to another grid as timm does; None for another tensor."""
        if key != "pos_embed":
            return None
        # Without and with a row of the class token: N and N - 1 are never both squares.
        candidates = (resize_positions(tensor, shape, prefix, grid) for prefix in (0, 1))
        return next((resized for resized in candidates if resized is not None), None)

    def check(self, vit: VisionTransformer) -> None:
        """Raise ConversionError for tokens, norms and pooling that a spec does not have."""
        self._require_patches(vit.patch_embed)
        self._require_classifier(vit.head)
        self._refuse(
            {
                f"register tokens (reg_tokens={vit.num_reg_tokens})": vit.num_reg_tokens,
                "a patch embedding without bias": vit.patch_embed.proj.bias is None,
                "a norm before the blocks (pre_norm)": not isinstance(vit.norm_pre, nn.Identity),
                f"pooling {vit.global_pool!r} (global_pool)": vit.global_pool not in {*_POOLS, ""},
                "fc_norm without pooling": not vit.global_pool and not isinstance(vit.fc_norm, nn.Identity),
                "pos_drop_rate": read_rate(vit.pos_drop),
                "patch_drop_rate": not isinstance(vit.patch_drop, nn.Identity),
            }
        )

    def list_blocks(self, vit: Any) -> list[Any]:
        """Return every block."""
        return list(vit.blocks)

    def find_input(self, vit: Any) -> tuple[nn.Conv2d, Sequence[int]]:
        """Return the first convolution, and height and width of images."""
        return vit.patch_embed.proj, vit.patch_embed.img_size

    def describe_stem(self, vit: Any) -> dict[str, Any]:
        """Return the spec of the patch embedding, with its token and positions."""
        norm, positioned = self._name_norm(vit.patch_embed.norm), vit.pos_embed is not None
        self._refuse({f"the patch embedding's norm {vit.patch_embed.norm} (not one of eps 1e-5)": norm == "layer_norm"})
        return {
            "type": "patch_embed",
            "patch": vit.patch_embed.patch_size[0],
            "norm": norm,
            "class_token": vit.has_class_token,
            "position": ("patches" if vit.has_class_token and vit.no_embed_class else "learned") if positioned else "none",
        }

    def describe_stages(self, vit: Any, choice: CouplingChoice) -> list[dict[str, Any]]:
        """Return the spec of the one stage."""
        attentions, mlps = map(self._describe_attention, vit.blocks), map(self._describe_mlp, vit.blocks)
        f, g = self._require_same("blocks", attentions), self._require_same("blocks", mlps)
        return [{"depth": len(vit.blocks), "width": vit.embed_dim, "f": f, "g": g}]

    def describe_head(self, vit: Any) -> dict[str, Any]:
        """Return the spec of the pooling and the classifier, or of a classifier of tokens."""
        if not vit.global_pool:
            self._refuse({"drop_rate before a classifier of tokens": read_rate(vit.head_drop)})
            return {"type": "token_linear", "norm": "none", "outputs": vit.num_classes}
        return {
            "type": "pooled_linear",
            "pool": _POOLS[vit.global_pool],
            "class_token": vit.has_class_token and vit.global_pool != "token" and not vit.pool_include_prefix,
            "fc_norm": self._name_norm(vit.fc_norm),
            "dropout": read_rate(vit.head_drop),
            "outputs": vit.num_classes,
        }

    def _describe_attention(self, block: Any) -> dict[str, Any]:
        attn, scaled = block.attn, isinstance(block.ls1, LayerScale)
        self._refuse({f"attention of class {type(attn).__name__}": type(attn) is not Attention})
        width = attn.qkv.in_features
        self._refuse(
            {
                "qk_norm": not isinstance(attn.q_norm, nn.Identity),
                "a norm of the attention's output (scale_attn_norm)": not isinstance(attn.norm, nn.Identity),
                "a gate in the attention (gated)": getattr(attn, "gate", None) is not None,
                f"heads of another width (attn_head_dim {attn.head_dim})": attn.head_dim * attn.num_heads != width,
                "an attention whose last layer has no bias (proj_bias)": attn.proj.bias is None,
                "attn_drop_rate": read_rate(attn.attn_drop),
                "proj_drop_rate": read_rate(attn.proj_drop),
                "a scale after the attention that is no LayerScale": not (scaled or isinstance(block.ls1, nn.Identity)),
            }
        )
        norm = self._name_norm(block.norm1)
        part = {"type": "attention", "heads": attn.num_heads, "norm": norm, "qkv_bias": attn.qkv.bias is not None}
        return {**part, "layer_scale": scaled}

    def _describe_mlp(self, block: Any) -> dict[str, Any]:
        mlp, scaled = block.mlp, isinstance(block.ls2, LayerScale)
        self._refuse({f"an MLP of class {type(mlp).__name__}": type(mlp) is not Mlp})
        self._refuse(
            {
                "a norm inside the MLP (scale_mlp_norm)": not isinstance(mlp.norm, nn.Identity),
                "an MLP without biases (proj_bias)": mlp.fc1.bias is None or mlp.fc2.bias is None,
                "proj_drop_rate": read_rate(mlp.drop1) or read_rate(mlp.drop2),
                "a scale after the MLP that is no LayerScale": not (scaled or isinstance(block.ls2, nn.Identity)),
                "drop path rates that differ in a block": read_rate(block.drop_path1) != read_rate(block.drop_path2),
            }
        )
        hidden, width = mlp.fc1.out_features, mlp.fc1.in_features
        act, norm = self._name_activation(mlp.act), self._name_norm(block.norm2)
        return {"type": "mlp", "ratio": find_mlp_ratio(hidden, width), "act": act, "norm": norm, "layer_scale": scaled}
