"""The head of language models and token classifiers: a linear layer for every token."""

from typing import Literal

from torch import Tensor, nn

from revzoo.bounds import NonNegativeInt
from revzoo.parts.context import BuildContext
from revzoo.parts.layers.linear_head import LinearHead
from revzoo.parts.layers.norm import build_token_norm
from revzoo.registry import heads


@heads.register("token_linear")
class TokenLinear(LinearHead):
    """Normalise, then map each token linearly to the outputs: logits of the next token, or of a class for each token.

    Shapes: (B, N, D) -> (B, N, outputs); a mask of the tokens is accepted and has no effect.
    Args:
        outputs: size of the vocabulary, or number of classes; 0: no linear layer, the normed tokens are returned.
        norm: norm before the linear layer, or `none`.
    """

    def __init__(
        self,
        context: BuildContext,
        *,
        outputs: NonNegativeInt,
        norm: Literal["layer_norm", "layer_norm_1e-5", "none"] = "layer_norm",
    ):
        width = context.shape.width
        super().__init__("linear", width)
        context.require_kind("tokens", "token_linear", "pooled_linear, or a stem that gives tokens, for example token_embed")
        self.norm = nn.Identity() if norm == "none" else build_token_norm(norm, width)
        self.reset(outputs)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        logits: Tensor = self.classifier(self.compute_pre_logits(x, mask))
        return logits

    def compute_pre_logits(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the normed tokens, (B, N, D)."""
        normed: Tensor = self.norm(x)
        return normed
