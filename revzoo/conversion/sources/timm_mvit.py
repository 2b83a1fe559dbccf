"""timm's MViTv2: pooling attention is f, the MLP is g, blocks that pool or widen are transitions; tensors keep their values."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from timm.models.mvitv2 import MultiScaleAttention, MultiScaleBlock, MultiScaleVit, checkpoint_filter_fn
from torch import Tensor, nn

from revzoo.conversion.mapping import Entry
from revzoo.conversion.sources import resize
from revzoo.conversion.sources.base import Choice, Tensors
from revzoo.conversion.sources.timm_modules import activation_name, drop_path, norm_name, rate, ratio, renames, same
from revzoo.conversion.sources.timm_source import TimmSource


class _Place(NamedTuple):
    """A block of the original: where it is, what it is, and whether it changes the width or the grid of tokens."""

    key: str
    block: Any
    ordinary: bool


class _Stage(NamedTuple):
    """A stage of ours: the ordinary blocks in front, and the reversible ones."""

    transition: list[_Place]
    steps: list[_Place]


class TimmMViT(TimmSource):
    """Convert `timm.models.mvitv2.MultiScaleVit` without class token.

    The first block of a stage, which pools, is an ordinary node; with `expand_attn=False` it begins with the last block of
    the stage before, which widens. Refused by name: a class token, other pooling than 3x3 convolutions, pooling in front of
    the linear layers (pool_first), stages that have no other block.

    Source: timm `mvitv2.py`, whose checkpoint_filter_fn gives files of facebookresearch/mvit timm's names.
    """

    name = "timm MViTv2"
    kind = MultiScaleVit

    def spec(self, original: Any, choice: Choice) -> dict[str, Any]:
        """Return the converted network's spec.

        Raises: ConversionError: something in the original that cannot be expressed; names it.
        """
        self._check(original)
        blocks = [block for stage in original.stages for block in stage.blocks]
        rates = [rate(block.drop_path1) for block in blocks]
        layout = self._layout(original)
        pairs = any(len(stage.transition) > 1 for stage in layout)
        self._refuse({"drop_path_rate where two blocks become one node (expand_attn=False)": pairs and max(rates)})
        stages = [self._stage(stage, choice) for stage in layout]
        return {
            "family": "rev_mvit",
            "input": {"kind": "image", "channels": original.patch_embed.proj.in_channels, "size": self._size(original)},
            "stem": {
                "type": "overlap_patch_embed",
                "width": original.patch_embed.proj.out_channels,
                "kernel": original.patch_embed.proj.kernel_size[0],
                "stride": original.patch_embed.proj.stride[0],
                "position": "none" if original.pos_embed is None else "learned",
            },
            "split": "duplicate",
            "block": {
                "coupling": choice.part(residual=True),
                "f": stages[0]["f"],
                "g": stages[0]["g"],
                "drop_path": drop_path(self.name, [0.0] if pairs else rates, transitions=True),
            },
            "stages": stages,
            "fuse": {"type": choice.fuse, "norm": norm_name(self.name, original.norm)},
            "head": self._head(original),
        }

    def canonical(self, original: Any, tensors: Tensors) -> tuple[dict[str, Tensor], list[str]]:
        """Return a file's tensors under timm's names, facebookresearch/mvit's as well, and what was done, in words."""
        if not any(key.startswith("blocks.") for key in tensors):
            return super().canonical(original, tensors)
        found, notes = super().canonical(original, checkpoint_filter_fn(dict(tensors), original))
        return found, ["facebookresearch/mvit's names became timm's: blocks are counted by stage", *notes]

    def entries(self, original: Any) -> Sequence[Entry]:
        """Return where every tensor goes."""
        rules = {r"(patch_embed|pos_embed)\b": r"stem.\1", r"norm\b": "fuse.norm", r"head\.fc\b": "head.linear"}
        for i, stage in enumerate(self._layout(original)):
            for j, place in enumerate(stage.transition):
                rules[rf"{place.key}\."] = f"stages.{i}.transition.blocks.{j}."
            for j, place in enumerate(stage.steps):
                for part, theirs, ours in (
                    ("f", "norm1", "norm"),
                    ("f", "attn", "attn"),
                    ("g", "norm2", "norm"),
                    ("g", "mlp", "mlp"),
                ):
                    rules[rf"{place.key}\.{theirs}\."] = f"stages.{i}.blocks.{j}.{part}.{ours}."
        return renames(self.name, original.state_dict(), rules)

    def resized(self, key: str, tensor: Tensor, shape: Sequence[int]) -> Tensor | None:
        """Return the positions of distances along another side, interpolated linearly as timm does, or None."""
        return resize.distances(tensor, shape) if key.endswith(("rel_pos_h", "rel_pos_w")) else None

    def _check(self, mvit: Any) -> None:
        self._refuse({f"the class {type(mvit).__name__}": type(mvit) is not MultiScaleVit})
        proj = mvit.patch_embed.proj
        (kernel, _), (stride, _) = proj.kernel_size, proj.stride
        square = proj.kernel_size == (kernel, kernel) and proj.stride == (stride, stride)
        self._refuse(
            {
                "a class token (use_cls_token)": mvit.cls_token is not None,
                "patches that are oblong or of even sides, or another padding than half of them (patch_kernel, patch_stride, "
                "patch_padding)": not square or not kernel % 2 or proj.padding != (kernel // 2, kernel // 2),
                f"pooling {mvit.global_pool!r} (global_pool)": mvit.global_pool not in ("avg", ""),
                "no classifier (num_classes=0; with num_classes=N it starts fresh)": not isinstance(mvit.head.fc, nn.Linear),
                "drop_rate in front of a classifier of tokens": not mvit.global_pool and rate(mvit.head.drop),
            }
        )
        for stage in mvit.stages:
            for block in stage.blocks:
                self._check_block(block)

    def _check_block(self, block: Any) -> None:
        attn = block.attn
        self._refuse({f"blocks of class {type(block).__name__}": type(block) is not MultiScaleBlock})
        self._refuse({f"attention of class {type(attn).__name__} (pool_first)": type(attn) is not MultiScaleAttention})
        self._refuse({f"pooling by {attn.mode!r} (mode)": attn.mode != "conv"})
        pools = [attn.pool_q, attn.pool_k, attn.pool_v]
        self._refuse({"attention that pools nothing, or not all (kernel_qkv)": any(pool is None for pool in pools)})
        norms = [block.norm1, block.norm2, attn.norm_q, attn.norm_k, attn.norm_v]
        self._refuse(
            {
                "pooling by other kernels than 3x3 (kernel_qkv)": any(pool.kernel_size != (3, 3) for pool in pools),
                "oblong strides (stride_q, stride_kv)": any(pool.stride[0] != pool.stride[1] for pool in pools),
                "an attention without biases (qkv_bias)": attn.qkv.bias is None,
                f"relative positions {attn.rel_pos_type!r} (rel_pos_type)": attn.rel_pos_type not in ("spatial", "none", ""),
                "norms whose eps is not 1e-6 (norm_eps)": {norm_name(self.name, norm) for norm in norms} != {"layer_norm"},
                "drop path rates that differ in a block": rate(block.drop_path1) != rate(block.drop_path2),
                "another activation than GELU": activation_name(self.name, block.mlp.act) != "gelu",
            }
        )

    def _layout(self, mvit: Any) -> list[_Stage]:
        """Return the stages of ours, or raise ConversionError."""
        stages: list[_Stage] = []
        ahead: list[_Place] = []  # ordinary blocks at the end of the stage before
        for i, stage in enumerate(mvit.stages):
            places = [_Place(rf"stages\.{i}\.blocks\.{j}", block, _is_ordinary(block)) for j, block in enumerate(stage.blocks)]
            steps = [place for place in places if not place.ordinary]
            message = f"a stage {i} of {len(places)} block(s), all of which change width or grid, so that nothing is reversible"
            self._refuse({message: not steps})
            begin, end = places.index(steps[0]), places.index(steps[-1]) + 1
            front = ahead + places[:begin]
            widens = [place.block.shortcut_proj_mlp is not None for place in front]
            odd = widens not in ([], [False], [True, False]) or end - begin > len(steps)
            self._refuse({f"other ordinary blocks around stage {i} than one that pools behind one that widens": odd})
            stages.append(_Stage(front, steps))
            ahead = places[end:]
        self._refuse({"a last block that changes the width": ahead})
        return stages

    def _stage(self, stage: _Stage, choice: Choice) -> dict[str, Any]:
        blocks = [place.block for place in stage.steps]
        built: dict[str, Any] = {
            "depth": len(blocks),
            "width": blocks[0].dim,
            "f": same(self.name, "blocks of a stage", map(_attention, blocks)),
            "g": same(self.name, "blocks of a stage", map(_mlp, blocks)),
        }
        if not stage.transition:
            return built
        *widening, pooling = (place.block for place in stage.transition)
        attention = _attention(pooling)
        transition = {
            "type": "multiscale_block",
            "fuse": choice.fuse,
            "heads": attention["heads"],
            "stride": pooling.attn.pool_q.stride[0],
            "kv_stride": attention["kv_stride"],
            "mlp_ratio": _mlp(pooling)["ratio"],
            "relative_position": attention["relative_position"],
            "residual_pooling": attention["residual_pooling"],
        }
        for block in widening:
            theirs = {**_attention(block), "ratio": _mlp(block)["ratio"]}
            ours = {**attention, "ratio": transition["mlp_ratio"]}
            same(
                self.name,
                "blocks of a transition",
                [{k: a[k] for k in ours if k not in ("heads", "kv_stride")} for a in (ours, theirs)],
            )
            transition |= {"widening_heads": theirs["heads"], "widening_kv_stride": theirs["kv_stride"]}
        return {**built, "transition": transition}

    def _size(self, mvit: Any) -> list[int]:
        """Return the size of images, which timm keeps as that of the first stage's grid only."""
        first, stride = mvit.stages[0], mvit.patch_embed.proj.stride[0]
        pooled = first.blocks[0].attn.pool_q.stride[0]
        size = [side * pooled * stride for side in first.feat_size]
        for stage in mvit.stages[1:]:
            step = stage.blocks[0].attn.pool_q.stride[0]
            stride *= step
        uneven = any(side % (stride * pooled) for side in size)
        self._refuse({f"a grid that strides do not divide ({size[0]}x{size[1]} pixels)": uneven})
        return size

    def _head(self, mvit: Any) -> dict[str, Any]:
        if not mvit.global_pool:
            return {"type": "token_linear", "norm": "none", "outputs": mvit.num_classes}
        return {"type": "pooled_linear", "pool": "mean", "dropout": rate(mvit.head.drop), "outputs": mvit.num_classes}


def _is_ordinary(block: Any) -> bool:
    pool = block.attn.pool_q
    return block.dim != block.dim_out or (pool is not None and max(pool.stride) > 1)


def _attention(block: Any) -> dict[str, Any]:
    attn = block.attn
    return {
        "type": "pooling_attention",
        "heads": attn.num_heads,
        "kv_stride": attn.pool_k.stride[0],
        "pool_query": True,
        "relative_position": attn.rel_pos_type == "spatial",
        "residual_pooling": attn.residual_pooling,
    }


def _mlp(block: Any) -> dict[str, Any]:
    linear = block.mlp.fc1
    return {"type": "mlp", "ratio": ratio(linear.out_features, linear.in_features), "act": "gelu", "norm": "layer_norm"}
