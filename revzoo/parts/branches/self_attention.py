"""The attention branch of BERT encoders. Module names are those of Transformers.

B examples, N tokens, D channels, M heads.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from revzoo.bounds import PositiveFloat, PositiveInt, Rate
from revzoo.parts.context import BuildContext
from revzoo.parts.layers.bert_sub_block import BertSubBlock, NormPosition
from revzoo.registry import branches


@branches.register("self_attention")
class SelfAttentionBranch(BertSubBlock):
    """Let each token attend to all tokens, with separate matrices for queries, keys and values.

    Shapes: (B, N, D) -> (B, N, D), D divisible by heads; mask (B, N), False at padding.
    Args:
        heads: number of attention heads.
        norm_position: `post` is LayerNorm(x + change), with a residual inside; `pre` is the change computed from LayerNorm(x).
        eps: eps of the LayerNorm.
        attention_dropout: probability of dropping an attention weight, in [0, 1).
        dropout: probability of dropping a channel of the change, in [0, 1).
    Source: Transformers' BertAttention and RobertaAttention; post as F in MEFT (Liao et al. 2023, `modeling_revbert.py`).
    """

    def __init__(
        self,
        context: BuildContext,
        *,
        heads: PositiveInt,
        norm_position: NormPosition = "post",
        eps: PositiveFloat = 1e-5,
        attention_dropout: Rate = 0.0,
        dropout: Rate = 0.0,
    ):
        width = context.width
        super().__init__(context, "self_attention", width, norm_position, eps, dropout)
        context.require_divisor("heads", heads)
        self._heads, self._attention_dropout = heads, attention_dropout
        self.self = nn.ModuleDict({name: nn.Linear(width, width) for name in ("query", "key", "value")})

    def _inner(self, x: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = (self.self[name](x).unflatten(2, (self._heads, -1)).transpose(1, 2) for name in ("query", "key", "value"))
        attn_mask = None if mask is None else mask[:, None, None, :]
        rate = self._attention_dropout if self.training else 0.0
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, dropout_p=rate)  # (B, M, N, D / M)
        return attended.transpose(1, 2).flatten(2)
