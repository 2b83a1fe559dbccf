"""Heads of encoders of text. Module names are those of Transformers' RoBERTa.

B examples, N tokens, D channels.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from revzoo.bounds import PositiveFloat, PositiveInt, Rate
from revzoo.errors import InputError, PartArgumentError
from revzoo.parts.context import BuildContext
from revzoo.parts.head import LinearHead
from revzoo.parts.norm import Activation, activation
from revzoo.registry import heads


@heads.register("sequence_classification")
class SequenceClassification(LinearHead):
    """Classify a text by its first token: dense, tanh, linear.

    Shapes: (B, N, D) -> (B, outputs); mask (B, N), False where no token is, which may be in front as well as behind.
    Args:
        outputs: number of classes.
        dropout: probability of dropping a channel in front of the last layer, in [0, 1).
        input_dropout: the same in front of the first layer. RoBERTa has it, BERT has not.
    Source: Transformers' RobertaClassificationHead; BERT's pooler and classifier are `dense` and `out_proj`.
    """

    def __init__(self, at: BuildContext, *, outputs: PositiveInt, dropout: Rate = 0.0, input_dropout: Rate = 0.0):
        super().__init__("out_proj")
        at.require("tokens", "sequence_classification", "pooled_linear, or a stem that gives tokens")
        self.input_dropout = nn.Dropout(input_dropout)
        self.dense = nn.Linear(at.shape.width, at.shape.width)
        self.dropout = nn.Dropout(dropout)
        self.out_proj = nn.Linear(at.shape.width, outputs)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        pooled = torch.tanh(self.dense(self.input_dropout(_first(x, mask))))
        logits: Tensor = self.out_proj(self.dropout(pooled))
        return logits


@heads.register("text_features")
class TextFeatures(nn.Module):
    """Hand over features, for a network that is no classifier: of a text, or of each of its tokens.

    Shapes: (B, N, D) -> (B, D) of a text, (B, N, D) of tokens; mask (B, N), False where no token is.
    Args:
        of: `text` is its first token behind a dense layer and tanh, `tokens` all of them as they are.
    Source: Transformers' BertModel and RobertaModel, pooler_output (`text`) and last_hidden_state (`tokens`).
    """

    def __init__(self, at: BuildContext, *, of: Literal["text", "tokens"] = "text"):
        super().__init__()
        at.require("tokens", "text_features", "pooled_linear, or a stem that gives tokens")
        self._width = at.shape.width
        self.dense = nn.Linear(self._width, self._width) if of == "text" else None

    @property
    def outputs(self) -> int:
        """Number of features."""
        return self._width

    def reset(self, outputs: int) -> None:
        """Refuse: the outputs are the network's own channels."""
        raise InputError(
            f"The {self._width} features of a text are the network's channels. Received: {outputs} outputs. Classes need "
            f"another head: overrides=['head={{type: sequence_classification, outputs: {outputs}}}']."
        )

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return x if self.dense is None else torch.tanh(self.dense(_first(x, mask)))


@heads.register("masked_lm")
class MaskedLM(nn.Module):
    """Score every id at every token: dense, activation, norm, and the stem's table of embeddings as the last weight.

    Shapes: (B, N, D) -> (B, N, vocabulary); a mask of the tokens changes nothing.
    Args:
        act: activation behind the dense layer.
        eps: of the LayerNorm.
    Source: Transformers' RobertaLMHead, and BertLMPredictionHead, which is the same.
    """

    def __init__(self, at: BuildContext, *, act: Activation = "gelu", eps: PositiveFloat = 1e-5):
        super().__init__()
        if at.embedding is None:
            raise PartArgumentError("type", "masked_lm", "a stem with a table of embeddings, for example token_embed")
        vocabulary, width = at.embedding.shape
        self.dense = nn.Linear(at.shape.width, width)
        self.act = activation(act)()
        self.layer_norm = nn.LayerNorm(width, eps=eps)
        self.weight = at.embedding
        self.bias = nn.Parameter(torch.zeros(vocabulary))

    @property
    def outputs(self) -> int:
        """Size of the vocabulary."""
        return self.weight.shape[0]

    def reset(self, outputs: int) -> None:
        """Refuse: the outputs are the vocabulary."""
        raise InputError(
            f"A masked language model scores the {self.outputs} ids of its vocabulary. Received: {outputs} outputs. Another "
            "vocabulary is set with overrides=['input.vocabulary=N']; classes need the head sequence_classification."
        )

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return F.linear(self.layer_norm(self.act(self.dense(x))), self.weight, self.bias)


def _first(x: Tensor, mask: Tensor | None) -> Tensor:
    """Return each text's first token, (B, D), which may have padding in front."""
    if mask is not None:
        x = x.take_along_dim(mask.int().argmax(1)[:, None, None], 1)  # argmax finds the first of the largest
    return x[:, 0]
