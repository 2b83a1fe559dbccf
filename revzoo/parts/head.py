"""Heads: from features to what the task asks for."""

from math import inf
from typing import Literal, cast

from timm.layers import BatchNormAct2d
from torch import Tensor, nn

from revzoo.bounds import Positive, Rate, Update
from revzoo.errors import MisfitError
from revzoo.parts.site import Site
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
        pool: `mean` or `max` over everything but batch and channels.
        dropout: probability of dropping a pooled feature, in [0, 1).
        norm: before pooling; `batch_norm` (with ReLU), for images, or `none`.
        momentum: of BatchNorm's running statistics.
    """

    def __init__(
        self,
        at: Site,
        *,
        outputs: Positive,
        pool: Literal["mean", "max"] = "mean",
        dropout: Rate = 0.0,
        norm: Literal["batch_norm", "none"] = "none",
        momentum: Update = 0.1,
    ):
        super().__init__("linear")
        if norm == "batch_norm" and at.shape.layout != "image":
            raise MisfitError("norm", norm, "none, or batch_norm behind images; tokens are normed by the fuse")
        self._dims = (2, 3) if at.shape.layout == "image" else (1,)
        self._pool = pool
        self.norm = nn.Identity() if norm == "none" else BatchNormAct2d(at.shape.width, momentum=momentum)
        self.dropout = nn.Dropout(dropout)
        self.linear = nn.Linear(at.shape.width, outputs)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.norm(x)
        if mask is None:
            pooled = x.mean(self._dims) if self._pool == "mean" else x.amax(self._dims)
        else:
            absent = ~mask[:, :, None]
            kept = x.masked_fill(absent, 0.0 if self._pool == "mean" else -inf)
            pooled = kept.sum(1) / mask.sum(1, keepdim=True) if self._pool == "mean" else kept.amax(1)
        logits: Tensor = self.linear(self.dropout(pooled))
        return logits
