"""Attention whose queries are its keys: over all tokens, or over those that locality-sensitive hashing brings together.

B examples, M heads, R rounds of hashing, N tokens, C channels of a head, G groups of K tokens that attend to each other.
"""

import torch
import torch.nn.functional as F
from timm.layers import DropPath
from torch import Tensor, nn

from revzoo.bounds import PositiveInt, Rate
from revzoo.errors import PartArgumentError
from revzoo.parts.context import BuildContext
from revzoo.parts.norm import TokenNorm, token_norm
from revzoo.registry import branches

# Added to logits: so far apart that the one counts for nothing beside the other, finite so that rows of padding stay numbers,
# and small enough for float16. The public implementation has -5e4 and the most negative number.
_ITSELF, _NEVER = -1e4, -3e4


class _SharedQK(nn.Module):
    """Norm, one projection for queries and keys and one for values, attention of the subclass, projection, drop path."""

    def __init__(self, at: BuildContext, name: str, heads: int, causal: bool, dropout: float, norm: TokenNorm):
        super().__init__()
        at.require("tokens", name)
        if at.width % heads:
            raise PartArgumentError("heads", heads, f"a divisor of the width {at.width}")
        self.heads, self.causal = heads, causal
        self.norm = token_norm(norm, at.width)
        self.to_qk = nn.Linear(at.width, at.width, bias=False)
        self.to_v = nn.Linear(at.width, at.width, bias=False)
        self.to_out = nn.Linear(at.width, at.width)
        self.dropout = nn.Dropout(dropout)
        self.drop_path = DropPath(at.drop_path)

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
class SharedQKAttention(_SharedQK):
    """Attend over all tokens with queries that are, at unit length, the keys too.

    A token attends to itself only where it may attend to nothing else. The parameters are those of `lsh_attention`, so
    either can use the other's weights.

    Shapes: (B, N, D) -> (B, N, D), D divisible by heads; mask (B, N), False where no token is.
    Args:
        heads: number of attention heads.
        causal: whether tokens attend only to those before them.
        dropout: probability of dropping an attention weight, in [0, 1).
        norm: in front of the attention.
    Source: Reformer (Kitaev et al. 2020), section 2, "shared-QK attention"; lucidrains/reformer-pytorch, FullQKAttention.
    """

    def __init__(
        self, at: BuildContext, *, heads: PositiveInt, causal: bool = True, dropout: Rate = 0.0, norm: TokenNorm = "layer_norm"
    ):
        super().__init__(at, "shared_qk_attention", heads, causal, dropout, norm)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        place = torch.arange(q.shape[2], device=q.device)
        absent = q.new_zeros((), dtype=torch.bool) if mask is None else ~mask[:, None, None, :]
        bias = _bias(place, place, absent, self.causal, q.dtype)
        rate = self.dropout.p if self.training else 0.0
        return F.scaled_dot_product_attention(q, k, v, bias, rate, scale=1.0)


@branches.register("lsh_attention")
class LSHAttention(_SharedQK):
    """Attend, with queries that are the keys too, only to tokens that fall into the same or nearby hash buckets.

    Each round hashes by a random rotation, sorts the tokens by bucket and position and cuts them into groups; a group
    attends to itself and the one before it. Rounds are weighed by their sums of exponentials, so a pair that meets in
    several rounds counts in each. A token attends to itself only where it meets nothing else. Texts of any length are
    filled up to whole groups; what is filled in or masked is sorted behind all tokens and changes nothing.

    Rotations are drawn from torch's random stream in training and fixed in eval, so that evaluation repeats itself.

    Two things that hashing cannot promise. A causal token takes nothing from later ones, and its output has no gradient
    to them; but where later tokens fall moves the borders of groups, and so decides which earlier ones it meets. And a
    state rebuilt to rounding may hash otherwise, rarely, than the one it stands for: once in the 1.6 million hashes of 12
    layers, 8 heads and 4,096 tokens in float32, at random weights, which left the lowest state 4e-4 off. One such hash in
    the top layer, of 1,024 tokens, brought 18 more below it and changed the gradient by 1e-3. Rebuilding bit by bit
    (`exact=True`) or keeping inputs (`recompute`, `store`) repeats every hash; reformer-pytorch keeps the buckets instead.

    Shapes: (B, N, D) -> (B, N, D), D divisible by heads; mask (B, N), False where no token is.
    Args:
        heads: number of attention heads.
        bucket: tokens in a group, at most the input's; buckets are as many as groups, rounded up to an even number.
        hashes: rounds of hashing.
        causal: whether tokens attend only to those before them.
        dropout: probability of dropping an attention weight, in [0, 1).
        norm: in front of the attention.
    Source: Reformer (Kitaev et al. 2020), section 2, without its correction N_ij for pairs that meet in several rounds, as
        is the default of lucidrains/reformer-pytorch. There the first group looks back to the last one of another round,
        and each text is hashed into as many buckets as its own length asks for; here the first group looks back to
        nothing, as in the paper, and the input's length counts, so that filling up changes nothing.
    """

    rotations: Tensor

    def __init__(
        self,
        at: BuildContext,
        *,
        heads: PositiveInt,
        bucket: PositiveInt = 64,
        hashes: PositiveInt = 4,
        causal: bool = True,
        dropout: Rate = 0.0,
        norm: TokenNorm = "layer_norm",
    ):
        super().__init__(at, "lsh_attention", heads, causal, dropout, norm)
        length = at.shape.dims[0]
        if bucket > length:
            raise PartArgumentError("bucket", bucket, f"at most {length}, the number of tokens")
        self.bucket = bucket
        self._half = -(-length // (2 * bucket))  # of the number of buckets: each rotated axis has two ends
        self._drawn = (at.width // heads, hashes, self._half), at.index
        self.register_buffer("rotations", self.constants()["rotations"].to(torch.get_default_device()), persistent=False)

    def constants(self) -> dict[str, Tensor]:
        """Return the buffer that no file holds, on the CPU: the same for every model of the spec."""
        shape, seed = self._drawn
        return {"rotations": torch.randn(shape, generator=torch.Generator().manual_seed(seed), device="cpu")}

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        order, near, bias, undo = self._groups(q, mask)
        q, k, v = _pick(q, order), _pick(k, near), _pick(v, near)  # (B, M, R, G, K or 2K, C)
        logits = q @ k.mT + bias  # (B, M, R, G, K, 2K)
        # Softmax in parts, of which autograd keeps one: neither shift has a gradient, for the quotient has none to them.
        shift = logits.detach().amax(-1, keepdim=True)
        weights = (logits - shift).exp()
        total = weights.sum(-1, keepdim=True)
        out = self.dropout(weights.to(v.dtype)) @ v
        out, total, shift = (_unsort(each, undo) for each in (out, total, shift))  # (B, M, R, N, C or 1)
        scale = (shift - shift.amax(2, keepdim=True)).exp()
        mixed: Tensor = (out * scale).sum(2) / (total * scale).sum(2)
        return mixed.to(v.dtype)

    @torch.no_grad()
    def _groups(self, qk: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return whom each group holds (B, M, R, G, K), whom it meets (... 2K), the logits' bias, and where tokens went."""
        tokens = qk.shape[2]
        size = min(self.bucket, tokens)
        count = -(-tokens // size)
        nowhere = 2 * self._half  # the bucket behind all others, of what is no token
        buckets = self._hash(qk)
        if mask is not None:
            buckets = buckets.masked_fill(~mask[:, None, None, :], nowhere)
        buckets, order = F.pad(buckets, (0, count * size - tokens), value=nowhere).sort(dim=-1, stable=True)
        undo = order.argsort(-1)[..., :tokens]
        order, absent = (each.unflatten(-1, (count, size)) for each in (order, buckets == nowhere))
        before = absent.roll(1, 3)
        before[:, :, :, 0] = True  # the first group has none before it
        near = torch.cat((order.roll(1, 3), order), -1)
        dtype = torch.promote_types(qk.dtype, torch.float32)  # sums of exponentials need more than half precision
        bias = _bias(order, near, torch.cat((before, absent), -1)[..., None, :], self.causal, dtype)
        last = tokens - 1  # stands for what was filled in, which nobody attends to
        return order.clamp(max=last), near.clamp(max=last), bias, undo

    def _hash(self, qk: Tensor) -> Tensor:
        """Return a bucket for every round and token, (B, M, R, N)."""
        rotations = self.rotations.to(qk)
        if self.training:
            rotations = torch.randn_like(rotations)
        rotated = torch.einsum("bmnc,crh->bmrnh", qk, rotations)
        return torch.cat((rotated, -rotated), -1).argmax(-1)


def _bias(query: Tensor, key: Tensor, absent: Tensor, causal: bool, dtype: torch.dtype) -> Tensor:
    """Return what to add to logits (..., queries, keys), given positions (..., queries) and (..., keys)."""
    query, key = query[..., :, None], key[..., None, :]
    never = absent | (key > query) if causal else absent
    bias = torch.zeros((), dtype=dtype, device=query.device).masked_fill(key == query, _ITSELF)
    return bias.masked_fill(never, _NEVER)


def _pick(x: Tensor, index: Tensor) -> Tensor:
    """Return the tokens of x (B, M, N, C) at index (B, M, R, G, K): (B, M, R, G, K, C).

    Each round picks from a view of its own: their gradients are added afterwards, in an order that repeats.
    """
    rounds = x[:, :, None].expand(-1, -1, index.shape[2], -1, -1)
    flat = index.flatten(3)[..., None].expand(-1, -1, -1, -1, x.shape[-1])
    picked: Tensor = rounds.gather(3, flat).unflatten(3, index.shape[3:])
    return picked


def _unsort(x: Tensor, undo: Tensor) -> Tensor:
    """Return x (B, M, R, G, K, C) in the order of the text: (B, M, R, N, C)."""
    return x.flatten(3, 4).gather(3, undo[..., None].expand(-1, -1, -1, -1, x.shape[-1]))
