"""timm's MViTv2: pooling attention becomes f, the MLP becomes g, and every tensor keeps its values.

Blocks that pool or widen become transitions, which are not reversible.
"""

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

from timm.models.mvitv2 import MultiScaleAttention, MultiScaleBlock, MultiScaleVit, checkpoint_filter_fn
from torch import Tensor, nn

from revzoo.conversion.choice import CouplingChoice
from revzoo.conversion.mapping import TensorMapping
from revzoo.conversion.sources.base import Tensors, find_mlp_ratio
from revzoo.conversion.sources.tensors import GridSize
from revzoo.conversion.sources.timm_base import TimmSource, read_rate
from revzoo.parts.layers.position import resize_distances


class _KeyedBlock(NamedTuple):
    """A block of the original, a pattern of its keys' prefix, and whether it changes the width or the grid of tokens."""

    key: str
    block: Any
    changes_shape: bool


class _Stage(NamedTuple):
    """A stage of the converted network: the blocks that its transition consists of, and the reversible ones."""

    transition: list[_KeyedBlock]
    reversible: list[_KeyedBlock]


class TimmMViT(TimmSource):
    """Convert `timm.models.mvitv2.MultiScaleVit` without class token.

    The first block of a stage pools, so it becomes the stage's transition. With `expand_attn=False` the last block of the
    stage before widens; it then is the first part of that transition. Refused by name: a class token, pooling by anything but
    3x3 convolutions, pooling before the linear layers (pool_first), stages without a block that could be reversible.

    Source: timm `mvitv2.py`, whose checkpoint_filter_fn gives files of facebookresearch/mvit timm's names.
    """

    name = "timm MViTv2"
    network_class, block_classes = MultiScaleVit, (MultiScaleBlock,)
    family, drops_transitions = "rev_mvit", True

    def canonicalise(self, network: Any, tensors: Tensors) -> tuple[dict[str, Tensor], list[str]]:
        """Return a file's tensors under timm's names, also those of a file of facebookresearch/mvit, and notes on changes."""
        if not any(key.startswith("blocks.") for key in tensors):
            return super().canonicalise(network, tensors)
        renamed, notes = super().canonicalise(network, checkpoint_filter_fn(dict(tensors), network))
        return renamed, ["facebookresearch/mvit's names became timm's: blocks are counted by stage", *notes]

    def map_tensors(self, network: Any) -> Sequence[TensorMapping]:
        """Return the mapping of every tensor."""
        rules = {r"(patch_embed|pos_embed)\b": r"stem.\1", r"norm\b": "fuse.norm", r"head\.fc\b": "head.linear"}
        for i, stage in enumerate(self._group_blocks(network)):
            for j, keyed_block in enumerate(stage.transition):
                rules[rf"{keyed_block.key}\."] = f"stages.{i}.transition.blocks.{j}."
            for j, keyed_block in enumerate(stage.reversible):
                for part, theirs, ours in (
                    ("f", "norm1", "norm"),
                    ("f", "attn", "attn"),
                    ("g", "norm2", "norm"),
                    ("g", "mlp", "mlp"),
                ):
                    rules[rf"{keyed_block.key}\.{theirs}\."] = f"stages.{i}.blocks.{j}.{part}.{ours}."
        return self._rename_keys(network.state_dict(), rules)

    def resize(self, key: str, tensor: Tensor, shape: Sequence[int], grid: GridSize | None = None) -> Tensor | None:
        """Return embeddings of relative positions interpolated as timm does; None for another tensor."""
        return resize_distances(tensor, shape) if key.endswith(("rel_pos_h", "rel_pos_w")) else None

    def check(self, mvit: Any) -> None:
        """Raise ConversionError for stems, blocks and pooling that a spec does not have."""
        self._require_classifier(mvit.head.fc)
        proj = mvit.patch_embed.proj
        (kernel, _), (stride, _) = proj.kernel_size, proj.stride
        square = proj.kernel_size == (kernel, kernel) and proj.stride == (stride, stride)
        self._refuse(
            {
                "a class token (use_cls_token)": mvit.cls_token is not None,
                "patches that are oblong, have even sides, or are not padded by half of them (patch_kernel, patch_stride, "
                "patch_padding)": not square or not kernel % 2 or proj.padding != (kernel // 2, kernel // 2),
                f"pooling {mvit.global_pool!r} (global_pool)": mvit.global_pool not in ("avg", ""),
                "drop_rate before a classifier of tokens": not mvit.global_pool and read_rate(mvit.head.drop),
            }
        )
        for block in self.list_blocks(mvit):
            self._check_block(block)

    def _check_block(self, block: Any) -> None:
        attn = block.attn
        self._refuse({f"attention of class {type(attn).__name__} (pool_first)": type(attn) is not MultiScaleAttention})
        self._refuse({f"pooling by {attn.mode!r} (mode)": attn.mode != "conv"})
        pools = [attn.pool_q, attn.pool_k, attn.pool_v]
        self._refuse(
            {"attention that does not pool all of queries, keys and values (kernel_qkv)": any(pool is None for pool in pools)}
        )
        norms = [block.norm1, block.norm2, attn.norm_q, attn.norm_k, attn.norm_v]
        self._refuse(
            {
                "pooling kernels other than 3x3 (kernel_qkv)": any(pool.kernel_size != (3, 3) for pool in pools),
                "oblong strides (stride_q, stride_kv)": any(pool.stride[0] != pool.stride[1] for pool in pools),
                "an attention without biases (qkv_bias)": attn.qkv.bias is None,
                f"relative positions {attn.rel_pos_type!r} (rel_pos_type)": attn.rel_pos_type not in ("spatial", "none", ""),
                "norms whose eps is not 1e-6 (norm_eps)": {self._name_norm(norm) for norm in norms} != {"layer_norm"},
                "drop path rates that differ in a block": read_rate(block.drop_path1) != read_rate(block.drop_path2),
                "another activation than GELU": self._name_activation(block.mlp.act) != "gelu",
            }
        )

    def _group_blocks(self, mvit: Any) -> list[_Stage]:
        """Return the blocks grouped into stages of the converted network, or raise ConversionError."""
        stages: list[_Stage] = []
        ahead: list[_KeyedBlock] = []  # blocks at the end of the stage before that change the width
        for i, stage in enumerate(mvit.stages):
            keyed = [
                _KeyedBlock(rf"stages\.{i}\.blocks\.{j}", block, _changes_shape(block)) for j, block in enumerate(stage.blocks)
            ]
            reversible = [each for each in keyed if not each.changes_shape]
            message = f"a stage {i} of {len(keyed)} block(s) that all change width or grid, so none is reversible"
            self._refuse({message: not reversible})
            begin, end = keyed.index(reversible[0]), keyed.index(reversible[-1]) + 1
            front = ahead + keyed[:begin]
            widens = [each.block.shortcut_proj_mlp is not None for each in front]
            odd = widens not in ([], [False], [True, False]) or end - begin > len(reversible)
            message = f"blocks around stage {i} that change width or grid, other than one that widens and then one that pools"
            self._refuse({message: odd})
            stages.append(_Stage(front, reversible))
            ahead = keyed[end:]
        self._refuse({"a last block that changes the width": ahead})
        return stages

    def _describe_stage(self, stage: _Stage, choice: CouplingChoice) -> dict[str, Any]:
        blocks = [each.block for each in stage.reversible]
        built: dict[str, Any] = {
            "depth": len(blocks),
            "width": blocks[0].dim,
            "f": self._require_same("blocks of a stage", map(_describe_attention, blocks)),
            "g": self._require_same("blocks of a stage", map(_describe_mlp, blocks)),
        }
        if not stage.transition:
            return built
        *widening, pooling = (each.block for each in stage.transition)
        attention = _describe_attention(pooling)
        transition = {
            "type": "multiscale_block",
            "fuse": choice.fuse,
            "heads": attention["heads"],
            "stride": pooling.attn.pool_q.stride[0],
            "kv_stride": attention["kv_stride"],
            "mlp_ratio": _describe_mlp(pooling)["ratio"],
            "relative_position": attention["relative_position"],
            "residual_pooling": attention["residual_pooling"],
        }
        for block in widening:
            theirs = {**_describe_attention(block), "ratio": _describe_mlp(block)["ratio"]}
            ours = {**attention, "ratio": transition["mlp_ratio"]}
            self._require_same(
                "blocks of a transition", [{k: a[k] for k in ours if k not in ("heads", "kv_stride")} for a in (ours, theirs)]
            )
            transition |= {"widening_heads": theirs["heads"], "widening_kv_stride": theirs["kv_stride"]}
        return {**built, "transition": transition}

    def list_blocks(self, mvit: Any) -> list[Any]:
        """Return every block."""
        return [block for stage in mvit.stages for block in stage.blocks]

    def list_rates(self, mvit: Any) -> list[float]:
        """Return the rate of drop path of every block."""
        rates = super().list_rates(mvit)
        pairs = any(len(stage.transition) > 1 for stage in self._group_blocks(mvit))
        self._refuse({"drop_path_rate where two blocks become one transition (expand_attn=False)": pairs and max(rates)})
        return rates

    def find_input(self, mvit: Any) -> tuple[nn.Conv2d, Sequence[int]]:
        """Return the first convolution, and height and width of images; timm keeps only the grid of the first stage."""
        conv, strides = mvit.patch_embed.proj, [stage.blocks[0].attn.pool_q.stride[0] for stage in mvit.stages]
        size = [side * strides[0] * conv.stride[0] for side in mvit.stages[0].feat_size]
        uneven = any(side % (conv.stride[0] * prod(strides)) for side in size)
        self._refuse({f"a grid whose sides are not multiples of the strides ({size[0]}x{size[1]} pixels)": uneven})
        return conv, size

    def describe_stem(self, mvit: Any) -> dict[str, Any]:
        """Return the spec of the patch embedding."""
        conv, position = mvit.patch_embed.proj, "none" if mvit.pos_embed is None else "learned"
        sizes = {"kernel": conv.kernel_size[0], "stride": conv.stride[0]}
        return {"type": "overlap_patch_embed", **sizes, "position": position}

    def describe_stages(self, mvit: Any, choice: CouplingChoice) -> list[dict[str, Any]]:
        """Return the spec of every stage, whose first blocks are a transition."""
        return [self._describe_stage(stage, choice) for stage in self._group_blocks(mvit)]

    def describe_head(self, mvit: Any) -> dict[str, Any]:
        """Return the spec of the classifier, of the image or of tokens."""
        if not mvit.global_pool:
            return {"type": "token_linear", "norm": "none", "outputs": mvit.num_classes}
        return {"type": "pooled_linear", "pool": "mean", "dropout": read_rate(mvit.head.drop), "outputs": mvit.num_classes}


def _changes_shape(block: Any) -> bool:
    pool = block.attn.pool_q
    return block.dim != block.dim_out or (pool is not None and max(pool.stride) > 1)


def _describe_attention(block: Any) -> dict[str, Any]:
    attn = block.attn
    return {
        "type": "pooling_attention",
        "heads": attn.num_heads,
        "kv_stride": attn.pool_k.stride[0],
        "pool_query": True,
        "relative_position": attn.rel_pos_type == "spatial",
        "residual_pooling": attn.residual_pooling,
    }


def _describe_mlp(block: Any) -> dict[str, Any]:
    linear = block.mlp.fc1
    return {
        "type": "mlp",
        "ratio": find_mlp_ratio(linear.out_features, linear.in_features),
        "act": "gelu",
        "norm": "layer_norm",
    }
