"""The head of language models and token classifiers: a linear layer for every token."""

from typing import Literal

from torch import Tensor, nn

from revzoo.bounds import NonNegativeInt, Rate
from revzoo.parts.context import BuildContext
from revzoo.parts.layers.linear_head import LinearHead
from revzoo.parts.layers.norm import Activation, build_token_norm, get_activation
from revzoo.registry import heads


@heads.register("token_linear")
class TokenLinear(LinearHead):
    """Normalise, then map each token linearly to the outputs: logits of the next token, or of a class for each token.

    Shapes: (B, N, D) -> (B, N, outputs); a mask of the tokens is accepted and has no effect.
    Args:
        outputs: size of the vocabulary, or number of classes; 0: no linear layer, the normed tokens are returned.
        norm: norm before the linear layer, or `none`.
        dropout: probability of dropping a channel before the linear layer, in [0, 1).
        act: activation after one more linear layer of the same width, which comes first; `none`: there is no such layer.
    Source: Transformers' token classification and question answering, and ElectraDiscriminatorPredictions (`act`).
    """

    def __init__(
        self,
        context: BuildContext,
        *,
        outputs: NonNegativeInt,
        norm: Literal["layer_norm", "layer_norm_1e-5", "none"] = "layer_norm",
        dropout: Rate = 0.0,
        act: Activation | Literal["none"] = "none",
    ):
        width = context.shape.width
        super().__init__("linear", width)
        context.require_kind("tokens", "token_linear", "pooled_linear, or a stem that gives tokens, for example token_embed")
        self.norm = nn.Identity() if norm == "none" else build_token_norm(norm, width)
        self.dense = None if act == "none" else nn.Linear(width, width)
        self.act = nn.Identity() if act == "none" else get_activation(act)()
        self.dropout = nn.Dropout(dropout)
        self.reset(outputs)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        logits: Tensor = self.classifier(self.compute_pre_logits(x, mask))
        return logits

    def compute_pre_logits(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the features of each token, (B, N, D), after dropout."""
        x = self.norm(x)
        if self.dense is not None:
            x = self.act(self.dense(x))
        dropped: Tensor = self.dropout(x)
        return dropped
