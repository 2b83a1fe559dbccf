"""What scripts written for timm's models ask of a model: its classifier, its features, its groups of parameters."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from types import MappingProxyType
from typing import Any, cast

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models._features import feature_take_indices
from torch import Tensor, nn

from revzoo.errors import InputError, PartArgumentError, join_names
from revzoo.model.inputs import make_mask
from revzoo.model.network import Network
from revzoo.model.tap import Tap
from revzoo.parts.context import BuildContext, Shape
from revzoo.registry import heads
from revzoo.runtime.lookahead import begin_lookahead
from revzoo.spec.edit import with_head
from revzoo.spec.schema import ImageInput

POOLS = {"avg": "mean", "max": "max", "token": "first", "": "none"}  # timm's global_pool -> the pool of a head


class TimmMethods(Network):
    """The methods of timm's models that are the same for all of revzoo's."""

    class_names: Sequence[str] | None
    data_config: Mapping[str, Any] = MappingProxyType({})  # what `pretrained_cfg` says otherwise than by default

    @property
    def pretrained_cfg(self) -> dict[str, Any]:
        """What timm asks of a model for images: its input, how data are normalised, the names of its first and last layer.

        `timm.data.resolve_data_config({}, model=model)` reads it. Mean and standard deviation are ImageNet's, or of other
        channels their averages, as `revzoo train` has them by default. Empty for texts.
        """
        if not isinstance(self.spec.input, ImageInput):
            return {}
        channels, grid = self.spec.input.channels, self._find_grid(self._list_stage_shapes()[-1])
        mean: tuple[float, ...] = IMAGENET_DEFAULT_MEAN
        std: tuple[float, ...] = IMAGENET_DEFAULT_STD
        if channels != 3:
            mean, std = ((sum(values) / 3,) * channels for values in (mean, std))
        return {
            "architecture": self.spec.name,
            "num_classes": self.num_classes,
            "input_size": (channels, *self.spec.input.size),
            "fixed_input_size": True,
            "pool_size": tuple(grid),
            "interpolation": "bicubic",
            "crop_pct": 0.875,
            "crop_mode": "center",
            "mean": mean,
            "std": std,
            "first_conv": find_first_convolution(self.stem),
            "classifier": find_classifier(self.head) if self.num_classes else None,
            **({} if self.class_names is None else {"label_names": self.class_names}),
            **self.data_config,
        }

    default_cfg = pretrained_cfg  # its older name

    @property
    def num_classes(self) -> int:
        """Number of classes; 0 if the model returns features."""
        return cast(int, self.head.num_classes)

    @property
    def num_features(self) -> int:
        """Number of channels that `forward_features` returns."""
        return cast(int, self.fuse.out_shape.width)

    @property
    def head_hidden_size(self) -> int:
        """Number of features that the classifier takes."""
        return cast(int, self.head.hidden_size)

    def get_classifier(self) -> nn.Module:
        """Return the last layer of the head: linear, or an Identity where there are no classes.

        Raises:
            InputError: the head does not end with a layer of its own.
        """
        self._require_classifier()
        return cast(nn.Module, self.head.classifier)

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the classifier by a new one with random weights, in the spec too. `reset_head` asks for at least one class.

        Args:
            num_classes: number of classes; 0: the model returns the features that the classifier would take.
            global_pool: how they are pooled: "avg", "max", "token" (the first one), or "": not at all. None: as before.
        Raises:
            InputError: the head has no classifier of its own, or cannot have these values.
        """
        self._require_classifier()
        if not isinstance(num_classes, int) or isinstance(num_classes, bool) or num_classes < 0:
            raise InputError(f"num_classes is an integer >= 0. Received: {num_classes!r}.")
        arguments: dict[str, object] = {"outputs": num_classes}
        if global_pool is not None:
            pools = [repr(pool) for pool in POOLS] if "pool" in heads.arguments(self.spec.head.type) else ["None"]
            if repr(global_pool) not in pools:
                allowed = join_names(pools)
                raise InputError(f"global_pool of the head {self.spec.head.type} is {allowed}. Received: {global_pool!r}.")
            arguments["pool"] = POOLS[global_pool]
        spec, old = with_head(self.spec, arguments), self.head
        shape = self.fuse.out_shape
        try:
            new = heads[spec.head.type](BuildContext(shape, shape.width), **spec.head.arguments)
        except PartArgumentError as error:
            raise InputError(f"The head {spec.head.type} cannot be changed. {error}") from error
        layer = old.classifier
        new.reset(num_classes, like=layer.weight if old.num_classes else next(self.parameters()))
        for name, child in old.named_children():
            if child is not layer:
                setattr(new, name, child)
        self.head, self.spec, self.class_names = new.train(old.training), spec, None

    def forward_head(self, x: Tensor, pre_logits: bool = False, mask: Tensor | None = None) -> Tensor:
        """Return the logits of what `forward_features` returned.

        Args:
            x: the features.
            pre_logits: return what the classifier would take instead.
            mask: (B, N), False at padding; texts only.
        """
        return cast(Tensor, self.head.compute_pre_logits(x, mask) if pre_logits else self.head(x, mask))

    @property
    def feature_info(self) -> list[dict[str, Any]]:
        """What `forward_intermediates` returns: the features after every stage, or after every block if there is one stage.

        Of each, `num_chs` channels (of both streams together, where they are concatenated), `reduction` of the image's sides,
        and the `module`.
        """
        shapes = self._list_stage_shapes()
        names = [f"stages.{i}" for i in range(len(shapes))]
        if len(shapes) == 1:
            names = [f"stages.0.blocks.{j}" for j in range(self.spec.stages[0].depth)]
            shapes = shapes * len(names)
        height = self.spec.input.size[0] if isinstance(self.spec.input, ImageInput) else 0
        return [
            {
                "num_chs": self.fuse.widening * shape.width,
                "reduction": max(1, round(height / self._find_grid(shape)[0])),
                "module": name,
            }
            for name, shape in zip(names, shapes, strict=True)
        ]

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | Sequence[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
        attention_mask: Tensor | None = None,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """Return the features of several depths, each the streams joined as the fuse joins them.

        Not free where steps are inverted: for backward one pair of streams is kept for each, as at a transition.

        Args:
            x: as for the model.
            indices: numbers of entries of `feature_info`, from the end if negative; an integer: that many of the last; None:
                all.
            norm: whether the features of the last stage are normalised as the fuse does it.
            stop_early: compute nothing after the last of them; needs intermediates_only.
            output_fmt: "NCHW", or "NLC" for tokens, without class token; texts have "NLC" alone.
            intermediates_only: whether to leave out what `forward_features` returns.
            attention_mask: as for the model.
        Returns: what `forward_features` returns, and the list of features in order; or that list alone.
        Raises:
            InputError: as for the model, or another argument has a value that is not allowed.
            AssertionError: timm's, for indices of features that there are not.
        """
        if stop_early and not intermediates_only:
            raise InputError("stop_early leaves no final features. Received: stop_early=True. Use intermediates_only=True too.")
        names = [f"{info['module']}." for info in self.feature_info]
        chosen = sorted(set(feature_take_indices(len(names), cast(Any, indices))[0]))
        shapes = self._list_stage_shapes()
        self._check_format(output_fmt, shapes[-1])
        taps = {[e.name for e in self.layout() if e.name.startswith(names[i])][-1]: Tap(self.fuse.join) for i in chosen}
        mask = make_mask(self.spec, x, attention_mask)
        final = self._compute_features(x, mask, begin_lookahead(self.lookahead), taps, stop_early)
        last = names.index(f"stages.{len(shapes) - 1}.") if len(shapes) > 1 else 0
        features = list[Tensor]()
        for i, tap in zip(chosen, taps.values(), strict=True):
            feature = cast(Tensor, tap.feature)
            if norm and i >= last and self.fuse.norm is not None:
                feature = self.fuse.norm(feature)
            features.append(self._format(feature, shapes[min(i, len(shapes) - 1)], output_fmt))
        return features if intermediates_only else (final, features)

    def no_weight_decay(self) -> set[str]:
        """Return names of parameters that should have no weight decay: position tables and class token.

        timm's `create_optimizer_v2` calls this.
        """
        names = {"pos_embed", "cls_token", "relative_position_bias_table", "rel_pos_h", "rel_pos_w"}
        return {name for name, _ in self.named_parameters() if name.rpartition(".")[2] in names}

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Return patterns that group parameters by depth: stem, blocks, the rest.

        timm's `create_optimizer_v2` calls this for layer-wise learning rates.

        Args:
            coarse: one group for each stage instead of one for each block.
        """
        per_block = [(r"^stages\.(\d+)\.transition", (0,)), (r"^stages\.(\d+)\.blocks\.(\d+)", None)]
        return {"stem": r"^stem", "blocks": r"^stages\.(\d+)" if coarse else per_block}

    def _list_stage_shapes(self) -> list[Shape]:
        """Return the shape of one stream in every stage."""
        shape, shapes = self.stem.out_shape, list[Shape]()
        for stage, written in zip(self.stages, self.spec.stages, strict=True):
            transition = getattr(stage, "transition", None)
            shape = replace(shape if transition is None else transition.out_shape, width=written.width)
            shapes.append(shape)
        return shapes

    def _find_grid(self, shape: Shape) -> tuple[int, ...]:
        """Return height and width of an image or a grid of tokens; the length of a text."""
        return shape.size if len(shape.size) == 2 else getattr(self.stem, "grid", shape.size)

    def _check_format(self, output_fmt: str, shape: Shape) -> None:
        formats = {"image": ["NCHW"], "tokens": ["NCHW", "NLC"] if isinstance(self.spec.input, ImageInput) else ["NLC"]}
        if output_fmt not in (allowed := formats[shape.kind]):
            raise InputError(f"output_fmt of {self.spec.name} is {' or '.join(allowed)}. Received: {output_fmt!r}.")

    def _format(self, feature: Tensor, shape: Shape, output_fmt: str) -> Tensor:
        """Return a feature as NCHW or NLC, without class token."""
        if shape.kind == "image":
            return feature
        grid = self._find_grid(shape)
        tokens = feature[:, feature.shape[1] - prod(grid) :] if len(grid) == 2 else feature
        return tokens.mT.unflatten(2, grid).contiguous() if output_fmt == "NCHW" else tokens

    def _require_classifier(self) -> None:
        if not hasattr(self.head, "classifier"):
            raise InputError(
                f"The head {self.spec.head.type} has no classifier. Classes of texts need another head: "
                "overrides=['head={type: sequence_classification, outputs: 2}']."
            )


def find_classifier(head: nn.Module) -> str | None:
    """Return the name in the model of the last layer; None where the head has none of its own."""
    layer = getattr(head, "classifier", None)
    return next((f"head.{name}" for name, module in head.named_children() if module is layer), None)


def find_first_convolution(stem: nn.Module) -> str | None:
    """Return the name in the model of the layer that takes the image, or None: some stems fold pixels into channels."""
    return next((f"stem.{name}" for name, module in stem.named_modules() if isinstance(module, nn.Conv2d)), None)
