"""The masked language model's head of BERT and RoBERTa. Module names are those of Transformers' RoBERTa."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from revzoo.bounds import PositiveFloat
from revzoo.errors import InputError, PartArgumentError
from revzoo.parts.context import BuildContext
from revzoo.parts.layers.norm import Activation, get_activation
from revzoo.registry import heads


@heads.register("masked_lm")
class MaskedLM(nn.Module):
    """Return logits over the vocabulary for every token: dense layer, activation, LayerNorm, and the stem's embedding table.

    Shapes: (B, N, D) -> (B, N, vocabulary); a mask of the tokens is accepted and has no effect.
    Args:
        act: activation after the dense layer.
        eps: eps of the LayerNorm.
    Source: Transformers' RobertaLMHead, and BertLMPredictionHead, which is the same.
    """

    def __init__(self, context: BuildContext, *, act: Activation = "gelu", eps: PositiveFloat = 1e-5):
        super().__init__()
        if context.embedding is None:
            raise PartArgumentError("type", "masked_lm", "a stem with a table of embeddings, for example token_embed")
        vocabulary, width = context.embedding.shape
        self.dense = nn.Linear(context.shape.width, width)
        self.act = get_activation(act)()
        self.layer_norm = nn.LayerNorm(width, eps=eps)
        self.weight = context.embedding
        self.bias = nn.Parameter(torch.zeros(vocabulary))

    @property
    def hidden_size(self) -> int:
        """Number of features that are compared with the embeddings."""
        return self.weight.shape[1]

    @property
    def num_classes(self) -> int:
        """Size of the vocabulary."""
        return self.outputs

    @property
    def outputs(self) -> int:
        """Size of the vocabulary."""
        return self.weight.shape[0]

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
        normed: Tensor = self.layer_norm(self.act(self.dense(x)))
        return normed
