"""The order in which a model or a chain calls its modules."""

from typing import Literal, NamedTuple

from torch import nn


class LayoutEntry(NamedTuple):
    """One of the modules that a model or chain calls in its forward.

    A `step` is reversible, a `layer` of one tensor may have an inverse of its own, a `node` is an ordinary module
    between chains. All three are *units*, which have a mode in `schedule`; in mode `invert` are only steps and layers.
    The `split` and a `bijection` have no mode.

    Args:
        name: path in the model, such as "stages.0.blocks.1.f".
        module: the module itself.
        kind: its role.
        stage: index of the stage it belongs to, None outside of stages.
        is_exact: whether the model computes exactly. Then a layer is not inverted, because its inverse rounds.
    """

    name: str
    module: nn.Module
    kind: Literal["step", "layer", "node", "split", "bijection"]
    stage: int | None = None
    is_exact: bool = False

    @property
    def is_unit(self) -> bool:
        """Whether it has a mode in `schedule`."""
        return self.kind in ("step", "layer", "node")

    @property
    def can_invert(self) -> bool:
        """Whether its mode may be `invert`."""
        return self.kind == "step" or (self.kind == "layer" and not self.is_exact)
