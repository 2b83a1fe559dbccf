"""The full attention branch of Reformers: queries and keys share one projection. The coupling adds the residual.

B examples, M heads, N tokens, C channels of a head.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from revzoo.bounds import PositiveInt, Rate
from revzoo.parts.context import BuildContext
from revzoo.parts.layers.drop_path import DropPath
from revzoo.parts.layers.norm import TokenNorm, build_token_norm
from revzoo.registry import branches

# Added to logits, of a token's own key and of keys it must not see. They are so far apart that one is negligible beside the
# other, finite so that rows of nothing but padding do not become NaN, and representable in float16. The public implementation
# uses -5e4 and the most negative number.
_OWN_KEY, _FORBIDDEN_KEY = -1e4, -3e4


class SharedQKBranch(nn.Module):
    """The base of attention with shared queries and keys: norm, projections, attention, output projection, drop path.

    A subclass defines `_attend`.
    """

    def __init__(self, context: BuildContext, part: str, heads: int, causal: bool, dropout: float, norm: TokenNorm):
        super().__init__()
        width = context.width
        context.require_kind("tokens", part)
        context.require_divisor("heads", heads)
        self.heads, self.causal = heads, causal
        self.norm = build_token_norm(norm, width)
        self.to_qk = nn.Linear(width, width, bias=False)
        self.to_v = nn.Linear(width, width, bias=False)
        self.to_out = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)
        self.drop_path = DropPath(context.drop_path)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        normed = self.norm(x)
        qk, v = (to(normed).unflatten(2, (self.heads, -1)).transpose(1, 2) for to in (self.to_qk, self.to_v))
        k = F.normalize(qk, dim=-1).to(qk.dtype) * qk.shape[-1] ** -0.5
        attended = self._attend(qk, k, v, mask).transpose(1, 2).flatten(2)
        out: Tensor = self.drop_path(self.to_out(attended))
        return out

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Return (B, M, N, C) from queries, scaled keys and values of that shape."""
        raise NotImplementedError


@branches.register("shared_qk_attention")
class SharedQKAttention(SharedQKBranch):
    """Attend over all tokens; the keys are the queries, normalised to unit length.

    A token attends to itself only if there is no other token it may attend to. The parameters are those of `lsh_attention`,
    so each of the two can load the other's weights.

    Shapes: (B, N, D) -> (B, N, D), D divisible by heads; mask (B, N), False at padding.
    Args:
        heads: number of attention heads.
        causal: whether tokens attend only to earlier ones.
        dropout: probability of dropping an attention weight, in [0, 1).
        norm: norm before the attention.
    Source: Reformer (Kitaev et al. 2020), section 2, "shared-QK attention"; lucidrains/reformer-pytorch, FullQKAttention.
    """

    def __init__(
        self,
        context: BuildContext,
        *,
        heads: PositiveInt,
        causal: bool = True,
        dropout: Rate = 0.0,
        norm: TokenNorm = "layer_norm",
    ):
        super().__init__(context, "shared_qk_attention", heads, causal, dropout, norm)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        positions = torch.arange(q.shape[2], device=q.device)
        absent = q.new_zeros((), dtype=torch.bool) if mask is None else ~mask[:, None, None, :]
        bias = build_attention_bias(positions, positions, absent, self.causal, q.dtype)
        rate = self.dropout.p if self.training else 0.0
        return F.scaled_dot_product_attention(q, k, v, bias, rate, scale=1.0)


def build_attention_bias(query: Tensor, key: Tensor, absent: Tensor, causal: bool, dtype: torch.dtype) -> Tensor:
    """Return the mask to add to the logits (..., queries, keys).

    Args:
        query: positions of the queries, (..., queries).
        key: positions of the keys, (..., keys).
        absent: True at keys that are padding; broadcasts to the logits.
        causal: whether keys later than the query are forbidden.
    """
    query, key = query[..., :, None], key[..., None, :]
    forbidden = absent | (key > query) if causal else absent
    bias = torch.zeros((), dtype=dtype, device=query.device).masked_fill(key == query, _OWN_KEY)
    return bias.masked_fill(forbidden, _FORBIDDEN_KEY)
