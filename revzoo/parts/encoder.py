"""Branches of BERT's encoder, normed behind (post) or in front (pre). Module names are those of Transformers.

B examples, N tokens, D channels, M heads.

- post: f(x) = LN(x + Drop(W Inner(x))) is the whole sub-block of the original, its inner residual included: f applied after
  f is the original network, whose layers pretrained weights fit.
- pre: f(x) = Drop(W Inner(LN(x))), to which the coupling adds the stream. Trains from scratch without warm-up tricks.
"""

from typing import Literal

import torch.nn.functional as F
from timm.layers import DropPath
from torch import Tensor, nn

from revzoo.bounds import PositiveFloat, PositiveInt, Rate
from revzoo.errors import PartArgumentError
from revzoo.parts.context import BuildContext
from revzoo.parts.norm import Activation, activation
from revzoo.registry import branches

NormPosition = Literal["pre", "post"]


class SubBlock(nn.Module):
    """What both sub-blocks share: output projection, dropout, and the norm around them.

    A subclass sets up what is inside and computes it in `_inner`.
    """

    def __init__(self, at: BuildContext, kind: str, inner_width: int, norm_position: NormPosition, eps: float, dropout: float):
        super().__init__()
        at.require("tokens", kind)
        self._post = norm_position == "post"
        self.output = nn.ModuleDict({"dense": nn.Linear(inner_width, at.width), "LayerNorm": nn.LayerNorm(at.width, eps)})
        self.dropout = nn.Dropout(dropout)
        self.drop_path = DropPath(at.drop_path)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        norm = self.output["LayerNorm"]
        inner = self._inner(x if self._post else norm(x), mask)
        change = self.dropout(self.output["dense"](inner))
        out: Tensor = self.drop_path(norm(x + change) if self._post else change)
        return out

    def _inner(self, x: Tensor, mask: Tensor | None) -> Tensor:
        raise NotImplementedError


@branches.register("self_attention")
class SelfAttentionBranch(SubBlock):
    """Attend globally, with separate matrices for queries, keys and values.

    Shapes: (B, N, D) -> (B, N, D), D divisible by heads; mask (B, N), False where no token is.
    Args:
        heads: number of attention heads.
        norm_position: `post` is LN(x + change), an inner residual included; `pre` is the change computed from LN(x).
        eps: of the LayerNorm.
        attention_dropout: probability of dropping an attention weight, in [0, 1).
        dropout: probability of dropping a channel of the change, in [0, 1).
    Source: Transformers' BertAttention and RobertaAttention; post as F in MEFT (Liao et al. 2023, `modeling_revbert.py`).
    """

    def __init__(
        self,
        at: BuildContext,
        *,
        heads: PositiveInt,
        norm_position: NormPosition = "post",
        eps: PositiveFloat = 1e-5,
        attention_dropout: Rate = 0.0,
        dropout: Rate = 0.0,
    ):
        super().__init__(at, "self_attention", at.width, norm_position, eps, dropout)
        if at.width % heads:
            raise PartArgumentError("heads", heads, f"a divisor of the width {at.width}")
        self._heads, self._attention_dropout = heads, attention_dropout
        self.self = nn.ModuleDict({name: nn.Linear(at.width, at.width) for name in ("query", "key", "value")})

    def _inner(self, x: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = (self.self[name](x).unflatten(2, (self._heads, -1)).transpose(1, 2) for name in ("query", "key", "value"))
        seen = None if mask is None else mask[:, None, None, :]
        rate = self._attention_dropout if self.training else 0.0
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, dropout_p=rate)  # (B, M, N, D / M)
        return attended.transpose(1, 2).flatten(2)


@branches.register("feed_forward")
class FeedForwardBranch(SubBlock):
    """Transform each token by itself.

    Shapes: (B, N, D) -> (B, N, D); a mask of the tokens changes nothing.
    Args:
        ratio: hidden width over width.
        act: activation between the two linear layers.
        norm_position: `post` is LN(x + change), an inner residual included; `pre` is the change computed from LN(x).
        eps: of the LayerNorm.
        dropout: probability of dropping a channel of the change, in [0, 1).
    Source: Transformers' BertIntermediate and BertOutput, and RoBERTa's; post as G in MEFT (Liao et al. 2023).
    """

    def __init__(
        self,
        at: BuildContext,
        *,
        ratio: PositiveFloat = 4.0,
        act: Activation = "gelu",
        norm_position: NormPosition = "post",
        eps: PositiveFloat = 1e-5,
        dropout: Rate = 0.0,
    ):
        hidden = int(at.width * ratio)
        if hidden < 1:
            raise PartArgumentError("ratio", ratio, f"a ratio that leaves a hidden channel of the width {at.width}")
        super().__init__(at, "feed_forward", hidden, norm_position, eps, dropout)
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(at.width, hidden)})
        self.act = activation(act)()

    def _inner(self, x: Tensor, mask: Tensor | None) -> Tensor:
        hidden: Tensor = self.act(self.intermediate["dense"](x))
        return hidden
