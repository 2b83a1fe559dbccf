"""The head of text encoders that are no classifiers: it returns features. Module names are those of Transformers."""

from typing import Literal

import torch
from torch import Tensor, nn

from revzoo.errors import InputError
from revzoo.parts.context import BuildContext
from revzoo.parts.layers.first_token import select_first_token
from revzoo.registry import heads


@heads.register("text_features")
class TextFeatures(nn.Module):
    """Return features instead of logits: of a whole text, or of each of its tokens.

    Shapes: (B, N, D) -> (B, D) of a text, (B, N, D) of tokens; mask (B, N), False at padding.
    Args:
        of: `text` returns the first token after a dense layer and tanh; `tokens` returns all tokens unchanged.
    Source: Transformers' BertModel and RobertaModel, pooler_output (`text`) and last_hidden_state (`tokens`).
    """

    def __init__(self, context: BuildContext, *, of: Literal["text", "tokens"] = "text"):
        super().__init__()
        context.require_kind("tokens", "text_features", "pooled_linear, or a stem that gives tokens")
        self._width = context.shape.width
        self.dense = nn.Linear(self._width, self._width) if of == "text" else None

    @property
    def hidden_size(self) -> int:
        """Number of features."""
        return self._width

    @property
    def num_classes(self) -> int:
        """0: there are none."""
        return 0

    @property
    def outputs(self) -> int:
        """Number of features."""
        return self._width

    def reset(self, outputs: int, like: Tensor | None = None) -> None:
        """Refuse: the outputs are the network's own channels."""
        raise InputError(
            f"The {self._width} features of a text are the network's channels. Received: {outputs} outputs. Classes need "
            f"another head: overrides=['head={{type: sequence_classification, outputs: {outputs}}}']."
        )

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.compute_pre_logits(x, mask)

    def compute_pre_logits(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the features."""
        return x if self.dense is None else torch.tanh(self.dense(select_first_token(x, mask)))
