"""The branches of Reformer: attention with queries as keys, over all tokens or hashed ones.

B examples, M heads, R rounds of hashing, N tokens, C channels of a head, G chunks of K tokens.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from revzoo.bounds import PositiveInt, Rate
from revzoo.errors import PartArgumentError
from revzoo.parts.context import BuildContext
from revzoo.parts.layers.convolution import TokenNorm, build_token_norm
from revzoo.parts.layers.drop_path import DropPath
from revzoo.registry import branches

# Added to logits, of a token's own key and of keys it must not see. They are so far apart that one is negligible next to the
# other, finite so that rows of nothing but padding do not become NaN, and representable in float16. The public implementation
# uses -5e4 and the most negative number.
_OWN_KEY, _FORBIDDEN_KEY = -1e4, -3e4


@branches.register("shared_qk_attention")
class SharedQKAttention(nn.Module):
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

    _part = "shared_qk_attention"  # for messages

    def __init__(
        self,
        context: BuildContext,
        *,
        heads: PositiveInt,
        causal: bool = True,
        dropout: Rate = 0.0,
        norm: TokenNorm = "layer_norm",
    ):
        super().__init__()
        width = context.width
        context.require_kind("tokens", self._part)
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
        return self.drop_path(self.to_out(attended))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Return (B, M, N, C) from queries, scaled keys and values of that shape."""
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


@branches.register("lsh_attention")
class LSHAttention(SharedQKAttention):
    """Attend only to tokens in the same or the previous chunk of similar tokens; queries and keys are shared.

    Each round hashes the tokens into buckets by a random rotation, sorts them by bucket and position, and cuts them into
    chunks of equal length. A chunk attends to itself and to the previous one. Rounds are weighted by their sums of
    exponentials, so a pair that meets in several rounds counts in each. A token attends to itself only where it meets no
    other. A text that does not fill its last chunk is padded; padded and masked tokens are sorted after all others and
    change nothing.

    Rotations are drawn from torch's random stream in training. In evaluation they are fixed, so that results repeat.

    Two properties of exact attention are lost:

    - Causality. The output of a token has no gradient to later tokens. But the buckets of later tokens move the borders of
      chunks, and thereby decide which earlier tokens it attends to.
    - Identical hashes in a reconstructed input. A state reconstructed in floating point can fall into another bucket. At
      random weights this happened once in the 1.6 million hashes of 12 layers, 8 heads and 4,096 tokens in float32, and left
      the input of the first layer off by 4e-4. One such hash in the last layer, of 1,024 tokens, caused 18 more in the layers
      below and changed the gradient by 1e-3. Exact arithmetic (`exact=True`) and modes that keep the inputs (`recompute`,
      `store`) repeat every hash; reformer-pytorch stores the buckets instead.

    Shapes: (B, N, D) -> (B, N, D), D divisible by heads; mask (B, N), False at padding.
    Args:
        heads: number of attention heads.
        bucket: tokens in a chunk, at most the input's length. There are as many buckets as chunks, rounded up to an even
            number.
        hashes: number of rounds of hashing.
        causal: whether tokens attend only to earlier ones.
        dropout: probability of dropping an attention weight, in [0, 1).
        norm: norm before the attention.
    Source: Reformer (Kitaev et al. 2020), section 2, without its correction N_ij for pairs that meet in several rounds, as
        is the default of lucidrains/reformer-pytorch. There, the first chunk also attends to the last one of another round,
        and the number of buckets follows each text's own length. Here the first chunk has no previous one, as in the paper,
        and the number of buckets follows the input's length, so that padding changes nothing.
    """

    _part = "lsh_attention"
    rotations: Tensor

    def __init__(
        self,
        context: BuildContext,
        *,
        heads: PositiveInt,
        bucket: PositiveInt = 64,
        hashes: PositiveInt = 4,
        causal: bool = True,
        dropout: Rate = 0.0,
        norm: TokenNorm = "layer_norm",
    ):
        super().__init__(context, heads=heads, causal=causal, dropout=dropout, norm=norm)
        length = context.shape.dims[0]
        if bucket > length:
            raise PartArgumentError("bucket", bucket, f"at most {length}, the number of tokens")
        self.bucket = bucket
        self._half_buckets = -(-length // (2 * bucket))  # a rotated axis has two ends, and each end is a bucket
        self._rotations_shape, self._seed = (context.width // heads, hashes, self._half_buckets), context.index
        self.register_buffer("rotations", self.build_constants()["rotations"].to(torch.get_default_device()), persistent=False)

    def build_constants(self) -> dict[str, Tensor]:
        """Return the buffer that no checkpoint holds, on the CPU: the same for every model of the spec."""
        rng = torch.Generator().manual_seed(self._seed)
        return {"rotations": torch.randn(self._rotations_shape, generator=rng, device="cpu")}

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        queries, keys, bias, inverse = self._sort_into_chunks(q, mask)
        q, k, v = _gather(q, queries), _gather(k, keys), _gather(v, keys)  # (B, M, R, G, K or 2K, C)
        logits = q @ k.mT + bias  # (B, M, R, G, K, 2K)
        # A softmax written out, because rounds are combined by its numerators and denominators. Their common factor cancels in
        # the quotient, so the shifts need no gradient, and autograd saves only one of the tensors of this size.
        shift = logits.detach().amax(-1, keepdim=True)
        weights = (logits - shift).exp()
        total = weights.sum(-1, keepdim=True)
        out = self.dropout(weights.to(v.dtype)) @ v
        out, total, shift = (_restore_order(each, inverse) for each in (out, total, shift))  # (B, M, R, N, C or 1)
        scale = (shift - shift.amax(2, keepdim=True)).exp()
        mixed: Tensor = (out * scale).sum(2) / (total * scale).sum(2)
        return mixed.to(v.dtype)

    @torch.no_grad()
    def _sort_into_chunks(self, qk: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return which tokens attend to which.

        Returns:
            Query indices of each chunk (B, M, R, G, K); key indices, the previous chunk's included (B, M, R, G, 2K); additive
            attention mask (B, M, R, G, K, 2K); inverse permutation, the place of each token after sorting (B, M, R, N).
        """
        tokens = qk.shape[2]
        size = min(self.bucket, tokens)
        chunks = -(-tokens // size)
        padding = 2 * self._half_buckets  # a bucket after all others
        buckets = self._hash(qk)
        if mask is not None:
            buckets = buckets.masked_fill(~mask[:, None, None, :], padding)
        buckets, order = F.pad(buckets, (0, chunks * size - tokens), value=padding).sort(dim=-1, stable=True)
        inverse = order.argsort(-1)[..., :tokens]
        order, absent = (each.unflatten(-1, (chunks, size)) for each in (order, buckets == padding))
        absent_before = absent.roll(1, 3)
        absent_before[:, :, :, 0] = True  # the first chunk has no previous one
        keys = torch.cat((order.roll(1, 3), order), -1)
        dtype = torch.promote_types(qk.dtype, torch.float32)  # sums of exponentials need more than half precision
        absent = torch.cat((absent_before, absent), -1)[..., None, :]
        bias = build_attention_bias(order, keys, absent, self.causal, dtype)
        last = tokens - 1  # any valid index will do for padding, which the mask excludes
        return order.clamp(max=last), keys.clamp(max=last), bias, inverse

    def _hash(self, qk: Tensor) -> Tensor:
        """Return the bucket of every token in every round, (B, M, R, N)."""
        rotations = self.rotations.to(qk)
        if self.training:
            rotations = torch.randn_like(rotations)
        rotated = torch.einsum("bmnc,crh->bmrnh", qk, rotations)
        return torch.cat((rotated, -rotated), -1).argmax(-1)


def _gather(x: Tensor, index: Tensor) -> Tensor:
    """Return the tokens of x (B, M, N, C) at index (B, M, R, G, K): (B, M, R, G, K, C).

    Each round gathers from its own view of x. The gradients of the views are then added in an order that repeats.
    """
    rounds = x[:, :, None].expand(-1, -1, index.shape[2], -1, -1)
    flat = index.flatten(3)[..., None].expand(-1, -1, -1, -1, x.shape[-1])
    return rounds.gather(3, flat).unflatten(3, index.shape[3:])


def _restore_order(x: Tensor, inverse: Tensor) -> Tensor:
    """Return x (B, M, R, G, K, C) in the order of the text: (B, M, R, N, C)."""
    return x.flatten(3, 4).gather(3, inverse[..., None].expand(-1, -1, -1, -1, x.shape[-1]))
