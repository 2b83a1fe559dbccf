"""A head that answers for every token."""

from typing import Literal

from torch import Tensor, nn

from revzoo.bounds import PositiveInt
from revzoo.parts.context import BuildContext
from revzoo.parts.head import LinearHead
from revzoo.parts.norm import token_norm
from revzoo.registry import heads


@heads.register("token_linear")
class TokenLinear(LinearHead):
    """Normalise, then map each token linearly to the outputs: the next token's logits, or a class for each.

    Shapes: (B, N, D) -> (B, N, outputs); a mask of the tokens changes nothing.
    Args:
        outputs: the vocabulary, or the number of classes.
        norm: in front.
    """

    def __init__(
        self, at: BuildContext, *, outputs: PositiveInt, norm: Literal["layer_norm", "layer_norm_1e-5", "none"] = "layer_norm"
    ):
        super().__init__("linear")
        at.require("tokens", "token_linear", "pooled_linear, or a stem that gives tokens, for example token_embed")
        self.norm = nn.Identity() if norm == "none" else token_norm(norm, at.shape.width)
        self.linear = nn.Linear(at.shape.width, outputs)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        logits: Tensor = self.linear(self.norm(x))
        return logits
