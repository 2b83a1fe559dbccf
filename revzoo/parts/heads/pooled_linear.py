"""The classification head of images: pool the features, then a linear layer."""

from math import inf
from typing import Literal

from timm.layers import BatchNormAct2d
from torch import Tensor, nn

from revzoo.bounds import NonNegativeInt, PositiveFloat, Rate, UnitInterval
from revzoo.errors import PartArgumentError
from revzoo.parts.context import BuildContext
from revzoo.parts.layers.convolution import build_leaky_norm, build_token_norm
from revzoo.parts.layers.linear_head import LinearHead
from revzoo.registry import heads


@heads.register("pooled_linear")
class PooledLinear(LinearHead):
    """Pool over space or tokens, then map linearly to the outputs.

    The fuse usually normalises. Only a network whose features are to be inverted leaves that to the head (`norm`).

    Shapes: (B, C, H, W) or (B, N, C) -> (B, outputs); mask (B, N), False at padding, which pooling leaves out.
    Args:
        outputs: number of classes; 0: no linear layer, the pooled features are returned.
        pool: `mean` or `max` over everything but batch and channels, the `first` token, which is the class token, or `none`:
            the linear layer is applied to every token. Of images `none` needs outputs: 0 and no `fc_norm`.
        class_token: whether the first token is a class token, which `mean` and `max` leave out.
        dropout: probability of dropping a pooled feature, in [0, 1).
        norm: norm before pooling: `batch_norm` (with ReLU), `leaky_batch_norm` or `in_place_abn` (with leaky ReLU, the second
            keeping less), for images, or `none`.
        fc_norm: norm after pooling, named as in timm, or `none`.
        momentum: momentum of BatchNorm's running statistics.
        bias: whether the linear layer has one.
        scale: factor of the logits.
        slope: of leaky ReLU's negative side.
    """

    def __init__(
        self,
        context: BuildContext,
        *,
        outputs: NonNegativeInt,
        pool: Literal["mean", "max", "first", "none"] = "mean",
        class_token: bool = False,
        dropout: Rate = 0.0,
        norm: Literal["batch_norm", "leaky_batch_norm", "in_place_abn", "none"] = "none",
        fc_norm: Literal["layer_norm", "layer_norm_1e-5", "none"] = "none",
        momentum: UnitInterval = 0.1,
        bias: bool = True,
        scale: PositiveFloat = 1.0,
        slope: PositiveFloat = 0.01,
    ):
        kind, width = context.shape.kind, context.shape.width
        super().__init__("linear", width, bias)
        if norm != "none" and kind != "image":
            raise PartArgumentError("norm", norm, "none for tokens, which are normed by the fuse")
        if pool == "first" and kind != "tokens":
            raise PartArgumentError("pool", pool, "mean or max for images")
        if pool == "none" and kind == "image" and (outputs or fc_norm != "none"):
            raise PartArgumentError("pool", pool, "mean or max, or outputs: 0 and no fc_norm")
        if class_token and kind != "tokens":
            raise PartArgumentError("class_token", class_token, "false for images")
        self._dims = (2, 3) if kind == "image" else (1,)
        self._pool, self._class_token = pool, class_token and pool in ("mean", "max")
        self.norm: nn.Module = nn.Identity()
        if norm == "batch_norm":
            self.norm = BatchNormAct2d(width, momentum=momentum)
        elif norm != "none":
            self.norm = build_leaky_norm(norm, width, slope)
        self.fc_norm = nn.Identity() if fc_norm == "none" else build_token_norm(fc_norm, width)
        self.dropout = nn.Dropout(dropout)
        self._scale = scale
        self.reset(outputs)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        logits = super().forward(x, mask)
        return logits if self._scale == 1 or not self.num_classes else logits * self._scale

    def compute_pre_logits(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the pooled features, (B, C), after their norm and dropout."""
        return self.dropout(self.fc_norm(self._pool_features(self.norm(x), mask)))

    def _pool_features(self, x: Tensor, mask: Tensor | None) -> Tensor:
        if self._pool == "none":
            return x
        if self._pool == "first":
            return x[:, 0]
        if self._class_token:
            x, mask = x[:, 1:], None if mask is None else mask[:, 1:]
        if mask is None:
            return x.mean(self._dims) if self._pool == "mean" else x.amax(self._dims)
        kept = x.masked_fill(~mask[:, :, None], 0.0 if self._pool == "mean" else -inf)
        return kept.sum(1) / mask.sum(1, keepdim=True) if self._pool == "mean" else kept.amax(1)
