"""The classification head of BERT and RoBERTa. Module names are those of Transformers' RoBERTa."""

import torch
from torch import Tensor, nn

from revzoo.bounds import NonNegativeInt, Rate
from revzoo.parts.context import BuildContext
from revzoo.parts.layers.first_token import select_first_token
from revzoo.parts.layers.linear_head import LinearHead
from revzoo.registry import heads


@heads.register("sequence_classification")
class SequenceClassification(LinearHead):
    """Classify a text by its first token: dense layer, tanh, linear layer.

    Shapes: (B, N, D) -> (B, outputs); mask (B, N), False at padding, which may be before a text as well as after it.
    Args:
        outputs: number of classes; 0: no last layer, the features before it are returned.
        dropout: probability of dropping a channel before the last layer, in [0, 1).
        input_dropout: probability of dropping a channel before the first layer, in [0, 1). RoBERTa has it, BERT has not.
    Source: Transformers' RobertaClassificationHead; BERT's pooler and classifier are `dense` and `out_proj`.
    """

    def __init__(self, context: BuildContext, *, outputs: NonNegativeInt, dropout: Rate = 0.0, input_dropout: Rate = 0.0):
        width = context.shape.width
        super().__init__("out_proj", width)
        context.require_kind("tokens", "sequence_classification", "pooled_linear, or a stem that gives tokens")
        self.input_dropout = nn.Dropout(input_dropout)
        self.dense = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)
        self.reset(outputs)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        logits: Tensor = self.classifier(self.compute_pre_logits(x, mask))
        return logits

    def compute_pre_logits(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the features of each text, (B, D), after dropout."""
        pooled = torch.tanh(self.dense(self.input_dropout(select_first_token(x, mask))))
        dropped: Tensor = self.dropout(pooled)
        return dropped
