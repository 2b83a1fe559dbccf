"""Heads: from features to what the task asks for."""

from math import inf
from typing import Literal, cast

from timm.layers import BatchNormAct2d
from torch import Tensor, nn

from revzoo.bounds import PositiveInt, Rate, UnitInterval
from revzoo.errors import PartArgumentError
from revzoo.parts.context import BuildContext
from revzoo.parts.norm import token_norm
from revzoo.registry import heads


class LinearHead(nn.Module):
    """What heads share whose last layer, called `last`, is linear: it has the number of outputs and can be replaced."""

    def __init__(self, last: str):
        super().__init__()
        self._last = last

    @property
    def outputs(self) -> int:
        """Size of the last dimension of what the head returns."""
        return cast(nn.Linear, getattr(self, self._last)).out_features

    def reset(self, outputs: int) -> None:
        """Replace the last layer by a fresh one with another number of outputs."""
        old = cast(nn.Linear, getattr(self, self._last))
        fresh = nn.Linear(old.in_features, outputs, device=old.weight.device, dtype=old.weight.dtype)
        setattr(self, self._last, fresh)


@heads.register("pooled_linear")
class PooledLinear(LinearHead):
    """Normalise if asked to, pool over space or tokens, then map linearly to the outputs.

    The norm is the fuse's affair, but for a network whose features are to be inverted.

    Shapes: (B, C, H, W) or (B, N, C) -> (B, outputs); mask (B, N), False where no token is, which pooling then passes over.
    Args:
        outputs: number of classes.
        pool: `mean` or `max` over everything but batch and channels, or the `first` token, which is the class token.
        class_token: whether the first token is a class token, which `mean` and `max` leave out.
        dropout: probability of dropping a pooled feature, in [0, 1).
        norm: before pooling; `batch_norm` (with ReLU), for images, or `none`.
        fc_norm: behind pooling, called as in timm.
        momentum: of BatchNorm's running statistics.
    """

    def __init__(
        self,
        at: BuildContext,
        *,
        outputs: PositiveInt,
        pool: Literal["mean", "max", "first"] = "mean",
        class_token: bool = False,
        dropout: Rate = 0.0,
        norm: Literal["batch_norm", "none"] = "none",
        fc_norm: Literal["layer_norm", "layer_norm_1e-5", "none"] = "none",
        momentum: UnitInterval = 0.1,
    ):
        super().__init__("linear")
        if norm == "batch_norm" and at.shape.layout != "image":
            raise PartArgumentError("norm", norm, "none, or batch_norm behind images; tokens are normed by the fuse")
        if pool == "first" and at.shape.layout != "tokens":
            raise PartArgumentError("pool", pool, "mean or max behind images")
        if class_token and at.shape.layout != "tokens":
            raise PartArgumentError("class_token", class_token, "false behind images")
        self._dims = (2, 3) if at.shape.layout == "image" else (1,)
        self._pool, self._class_token = pool, class_token and pool != "first"
        self.norm = nn.Identity() if norm == "none" else BatchNormAct2d(at.shape.width, momentum=momentum)
        self.fc_norm = nn.Identity() if fc_norm == "none" else token_norm(fc_norm, at.shape.width)
        self.dropout = nn.Dropout(dropout)
        self.linear = nn.Linear(at.shape.width, outputs)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        pooled = self.fc_norm(self._pooled(self.norm(x), mask))
        logits: Tensor = self.linear(self.dropout(pooled))
        return logits

    def _pooled(self, x: Tensor, mask: Tensor | None) -> Tensor:
        if self._pool == "first":
            return x[:, 0]
        if self._class_token:
            x, mask = x[:, 1:], None if mask is None else mask[:, 1:]
        if mask is None:
            return x.mean(self._dims) if self._pool == "mean" else x.amax(self._dims)
        kept = x.masked_fill(~mask[:, :, None], 0.0 if self._pool == "mean" else -inf)
        return kept.sum(1) / mask.sum(1, keepdim=True) if self._pool == "mean" else kept.amax(1)
