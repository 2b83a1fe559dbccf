"""Heads of language models and of classifiers of texts.

B examples, N tokens, D channels.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from revzoo.bounds import NonNegativeInt, PositiveFloat, Rate
from revzoo.errors import InputError, PartArgumentError
from revzoo.parts.context import BuildContext
from revzoo.parts.layers.convolution import ActivationName, TokenNorm, build_token_norm, get_activation
from revzoo.parts.layers.linear_head import LinearHead
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
        width = context.shape.width
        self.hidden_size = self.outputs = width
        self.num_classes = 0
        self.dense = nn.Linear(width, width) if of == "text" else None

    def reset(self, outputs: int, like: Tensor | None = None) -> None:
        """Refuse: the outputs are the network's own channels."""
        raise InputError(
            f"The {self.outputs} features of a text are the network's channels. Received: {outputs} outputs. Classes need "
            f"another head: overrides=['head={{type: sequence_classification, outputs: {outputs}}}']."
        )

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.compute_pre_logits(x, mask)

    def compute_pre_logits(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the features."""
        return x if self.dense is None else torch.tanh(self.dense(_select_first_token(x, mask)))


@heads.register("token_linear")
class TokenLinear(LinearHead):
    """Normalise, then map each token linearly to the outputs: logits of the next token, or of a class for each token.

    Shapes: (B, N, D) -> (B, N, outputs); a mask of the tokens is accepted and has no effect.
    Args:
        outputs: size of the vocabulary, or number of classes; 0: no linear layer, the normed tokens are returned; None, where
            tied: as many as there are embeddings.
        norm: norm before the linear layer, or `none`.
        dropout: probability of dropping a channel before the linear layer, in [0, 1).
        act: activation after one more linear layer of the same width, which comes first; `none`: there is no such layer.
        bias: whether the last linear layer has one.
        tied: whether its weight is the stem's table of embeddings; it then has no bias.
    Source: Transformers' token classification and question answering, and ElectraDiscriminatorPredictions (`act`); `tied`:
        Press and Wolf 2017, as in GPT-2.
    """

    per_token = True

    def __init__(
        self,
        context: BuildContext,
        *,
        outputs: NonNegativeInt | None = None,
        norm: TokenNorm | Literal["none"] = "layer_norm",
        dropout: Rate = 0.0,
        act: ActivationName | Literal["none"] = "none",
        bias: bool = True,
        tied: bool = False,
    ):
        width = context.shape.width
        super().__init__("linear", width, bias and not tied)
        context.require_kind("tokens", "token_linear", "pooled_linear, or a stem that gives tokens, for example token_embed")
        self.norm = nn.Identity() if norm == "none" else build_token_norm(norm, width)
        self.dense = None if act == "none" else nn.Linear(width, width)
        self.act = nn.Identity() if act == "none" else get_activation(act)()
        self.dropout = nn.Dropout(dropout)
        self._tied = False
        if not tied:
            if outputs is None:
                raise PartArgumentError("outputs", outputs, "an integer >= 0, or tied: true")
            self.reset(outputs)
            return
        table = context.embedding
        if table is None or table.shape[1] != width:
            raise PartArgumentError("tied", tied, f"false, or a stem with embeddings of {width} channels")
        if outputs not in (None, len(table)):
            raise PartArgumentError("outputs", outputs, f"{len(table)}, the number of tied embeddings, or tied: false")
        self.reset(len(table))
        self.classifier.register_parameter("weight", table)
        self._tied = True

    def reset(self, outputs: int, like: Tensor | None = None) -> None:
        """Replace the last layer by a fresh one, as for any head; refuse where it is the stem's table."""
        if self._tied:
            raise InputError(
                f"The head scores the {self.outputs} ids of the vocabulary with the stem's embeddings. Received: {outputs} "
                f"outputs. Another head is made with overrides=['head.tied=false','head.outputs={outputs}']."
            )
        super().reset(outputs, like)

    def compute_pre_logits(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the features of each token, (B, N, D), after dropout."""
        x = self.norm(x)
        if self.dense is not None:
            x = self.act(self.dense(x))
        return self.dropout(x)


@heads.register("masked_lm")
class MaskedLM(nn.Module):
    """Return logits over the vocabulary for every token: dense layer, activation, LayerNorm, and the stem's embedding table.

    Shapes: (B, N, D) -> (B, N, vocabulary); a mask of the tokens is accepted and has no effect.
    Args:
        act: activation after the dense layer.
        eps: eps of the LayerNorm.
    Source: Transformers' RobertaLMHead, and BertLMPredictionHead, which is the same.
    """

    per_token = True

    def __init__(self, context: BuildContext, *, act: ActivationName = "gelu", eps: PositiveFloat = 1e-5):
        super().__init__()
        if context.embedding is None:
            raise PartArgumentError("type", "masked_lm", "a stem with a table of embeddings, for example token_embed")
        vocabulary, width = context.embedding.shape
        self.dense = nn.Linear(context.shape.width, width)
        self.act = get_activation(act)()
        self.layer_norm = nn.LayerNorm(width, eps=eps)
        self.weight = context.embedding
        self.bias = nn.Parameter(torch.zeros(vocabulary))
        self.hidden_size = width
        self.outputs = self.num_classes = vocabulary

    def reset(self, outputs: int, like: Tensor | None = None) -> None:
        """Refuse: the outputs are the vocabulary."""
        raise InputError(
            f"A masked language model scores the {self.outputs} ids of its vocabulary. Received: {outputs} outputs. Another "
            "vocabulary is set with overrides=['input.vocabulary=N']; classes need the head sequence_classification."
        )

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return F.linear(self.compute_pre_logits(x, mask), self.weight, self.bias)

    def compute_pre_logits(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the features that are compared with the embeddings, (B, N, D)."""
        return self.layer_norm(self.act(self.dense(x)))


@heads.register("sequence_classification")
class SequenceClassification(LinearHead):
    """Classify a text by its first token: dense layer, activation, linear layer.

    Shapes: (B, N, D) -> (B, outputs); mask (B, N), False at padding, which may be before a text as well as after it.
    Args:
        outputs: number of classes; 0: no last layer, the features before it are returned.
        dropout: probability of dropping a channel before the last layer, in [0, 1).
        input_dropout: probability of dropping a channel before the first layer, in [0, 1). RoBERTa has it, BERT has not.
        act: activation after the first layer: `tanh` in BERT and RoBERTa, `gelu` in ELECTRA, `relu` in DistilBERT.
    Source: Transformers' RobertaClassificationHead; BERT's pooler and classifier are `dense` and `out_proj`.
    """

    def __init__(
        self,
        context: BuildContext,
        *,
        outputs: NonNegativeInt,
        dropout: Rate = 0.0,
        input_dropout: Rate = 0.0,
        act: ActivationName | Literal["tanh"] = "tanh",
    ):
        width = context.shape.width
        super().__init__("out_proj", width)
        context.require_kind("tokens", "sequence_classification", "pooled_linear, or a stem that gives tokens")
        self.input_dropout = nn.Dropout(input_dropout)
        self.dense = nn.Linear(width, width)
        self.act = nn.Tanh() if act == "tanh" else get_activation(act)()
        self.dropout = nn.Dropout(dropout)
        self.reset(outputs)

    def compute_pre_logits(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the features of each text, (B, D), after dropout."""
        pooled = self.act(self.dense(self.input_dropout(_select_first_token(x, mask))))
        return self.dropout(pooled)


def _select_first_token(x: Tensor, mask: Tensor | None) -> Tensor:
    """Return (B, D) from x (B, N, D): each text's first token, skipping padding before it.

    Args:
        mask: (B, N), False at padding; None means that there is none.
    """
    if mask is not None:
        first = mask.int().argmax(1)  # which returns the first True
        x = x.gather(1, first[:, None, None].expand(-1, 1, x.shape[2]))  # take_along_dim would fix the batch in an export
    return x[:, 0]
