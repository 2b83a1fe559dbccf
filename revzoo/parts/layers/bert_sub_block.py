"""What the two sub-blocks of a BERT encoder share. Module names are those of Transformers.

The LayerNorm has one of two positions:

- post: f(x) = LayerNorm(x + Dropout(W inner(x))) is the whole sub-block of the original, including its residual. Applying the
  branches one after the other is the original network, so its pretrained weights fit.
- pre: f(x) = Dropout(W inner(LayerNorm(x))); the coupling adds the residual. It trains from scratch without warm-up tricks.
"""

from typing import Literal

from torch import Tensor, nn

from revzoo.parts.context import BuildContext
from revzoo.parts.layers.drop_path import DropPath

NormPosition = Literal["pre", "post"]


class BertSubBlock(nn.Module):
    """The base of both sub-blocks: output projection, dropout, LayerNorm and drop path. A subclass defines `_inner`.

    Args:
        part: registered name of the part, for messages.
        inner_width: channels that `_inner` returns.
        norm_position: of the LayerNorm: `post`, after the residual as in the original, or `pre`, before `_inner`.
        eps: eps of the LayerNorm.
        dropout: probability of dropping a channel of the projected result.
    """

    def __init__(
        self, context: BuildContext, part: str, inner_width: int, norm_position: NormPosition, eps: float, dropout: float
    ):
        super().__init__()
        context.require_kind("tokens", part)
        width = context.width
        self._post = norm_position == "post"
        self.output = nn.ModuleDict({"dense": nn.Linear(inner_width, width), "LayerNorm": nn.LayerNorm(width, eps)})
        self.dropout = nn.Dropout(dropout)
        self.drop_path = DropPath(context.drop_path)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        norm = self.output["LayerNorm"]
        inner = self._inner(x if self._post else norm(x), mask)
        change = self.dropout(self.output["dense"](inner))
        return self.drop_path(norm(x + change) if self._post else change)

    def _inner(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Return what the output projection receives, (B, N, inner_width)."""
        raise NotImplementedError
