"""What scripts written for timm's models ask of a model: its classifier, its features, its groups of parameters."""

from typing import Any, Protocol, cast

from torch import Tensor, nn

from revzoo.errors import InputError, PartArgumentError, join_names
from revzoo.parts.context import BuildContext
from revzoo.registry import heads
from revzoo.spec.edit import with_head
from revzoo.spec.schema import Spec

_POOLS = {"avg": "mean", "max": "max", "token": "first", "": "none"}  # timm's global_pool -> the pool of a head


class Head(Protocol):
    """The interface of all heads, which are modules."""

    hidden_size: Any

    @property
    def outputs(self) -> int:
        """Size of the last dimension of the logits."""

    @property
    def num_classes(self) -> int:
        """The same, or 0 if the head returns features."""

    def reset(self, outputs: int, like: Tensor | None = None) -> None:
        """Replace the last linear layer by a new one with random weights; raise InputError if there is none to replace."""

    def compute_pre_logits(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return what the last layer takes."""

    def __call__(self, x: Tensor, mask: Tensor | None = None) -> Tensor: ...


class TimmMethods:
    """The methods of timm's models that are the same for all of revzoo's."""

    spec: Spec
    fuse: Any
    head: Any  # a Head

    @property
    def num_classes(self) -> int:
        """Number of classes; 0 if the model returns features."""
        return cast(Head, self.head).num_classes

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
            if global_pool not in _POOLS or "pool" not in heads.arguments(self.spec.head.type):
                pools = (
                    join_names([repr(pool) for pool in _POOLS]) if "pool" in heads.arguments(self.spec.head.type) else "None"
                )
                raise InputError(f"global_pool of the head {self.spec.head.type} is {pools}. Received: {global_pool!r}.")
            arguments["pool"] = _POOLS[global_pool]
        spec, old = with_head(self.spec, arguments), self.head
        shape = self.fuse.out_shape
        try:
            new = heads[spec.head.type](BuildContext(shape, shape.width), **spec.head.arguments)
        except PartArgumentError as error:
            raise InputError(f"The head {spec.head.type} cannot be changed. {error}") from error
        layer = old.classifier
        new.reset(num_classes, like=layer.weight if old.num_classes else next(cast(nn.Module, self).parameters()))
        for name, child in old.named_children():
            if child is not layer:
                setattr(new, name, child)
        self.head, self.spec = new.train(old.training), spec

    def forward_head(self, x: Tensor, pre_logits: bool = False, mask: Tensor | None = None) -> Tensor:
        """Return the logits of what `forward_features` returned.

        Args:
            x: the features.
            pre_logits: return what the classifier would take instead.
            mask: (B, N), False at padding; texts only.
        """
        head = cast(Head, self.head)
        return head.compute_pre_logits(x, mask) if pre_logits else head(x, mask)

    def no_weight_decay(self) -> set[str]:
        """Return names of parameters that should have no weight decay: position tables and class token.

        timm's `create_optimizer_v2` calls this.
        """
        names = {"pos_embed", "cls_token", "relative_position_bias_table", "rel_pos_h", "rel_pos_w"}
        return {name for name, _ in cast(nn.Module, self).named_parameters() if name.rpartition(".")[2] in names}

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Return patterns that group parameters by depth: stem, blocks, the rest.

        timm's `create_optimizer_v2` calls this for layer-wise learning rates.

        Args:
            coarse: one group for each stage instead of one for each block.
        """
        per_block = [(r"^stages\.(\d+)\.transition", (0,)), (r"^stages\.(\d+)\.blocks\.(\d+)", None)]
        return {"stem": r"^stem", "blocks": r"^stages\.(\d+)" if coarse else per_block}

    def _require_classifier(self) -> None:
        if not hasattr(self.head, "classifier"):
            raise InputError(
                f"The head {self.spec.head.type} has no classifier. Classes of texts need another head: "
                "overrides=['head={type: sequence_classification, outputs: 2}']."
            )
