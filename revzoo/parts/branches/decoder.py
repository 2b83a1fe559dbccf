"""The branches of decoders such as GPT-2 and Llama: attention to earlier tokens, and a whole block.

B examples, N tokens, D channels, M heads, K heads of keys and values, C channels of a head.
"""

from math import pi

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from revzoo.bounds import PositiveFloat, PositiveInt
from revzoo.errors import InputError, PartArgumentError
from revzoo.parts.branches.mlp import MlpBranch
from revzoo.parts.context import BuildContext
from revzoo.parts.layers.convolution import ActivationName, TokenNorm, build_token_norm
from revzoo.parts.layers.drop_path import DropPath
from revzoo.parts.layers.past import Past
from revzoo.registry import branches


@branches.register("causal_attention")
class CausalAttention(nn.Module):
    """Normalise the tokens and let each attend to itself and to earlier ones.

    Shapes: (B, N, D) -> (B, N, D), D divisible by heads. No mask is taken: padding after a text changes nothing before it, and
        padding before it would need one.
    Args:
        heads: number of attention heads.
        kv_heads: heads of keys and values, each shared by heads / kv_heads queries; None: as many as heads.
        rotary_base: base of rotary positions, such as 10000, which turn queries and keys; None: attention knows no positions.
        rotary_factor: by how much rotary positions are stretched as Llama 3.1 does it: rates that turn less than once in 8,192
            tokens are divided by it, those that turn more than four times stay, and those between are blended.
        norm: norm before the attention.
        bias: whether the linear layers have biases.
    Source: GPT-2 (Radford et al. 2019); RoFormer (Su et al. 2021); grouped queries: Ainslie et al. 2023; as in Transformers'
        GPT2Attention and LlamaAttention, whose queries, keys and values are one matrix here.
    """

    takes_past = True

    def __init__(
        self,
        context: BuildContext,
        *,
        heads: PositiveInt,
        kv_heads: PositiveInt | None = None,
        rotary_base: PositiveFloat | None = None,
        rotary_factor: PositiveFloat = 1.0,
        norm: TokenNorm = "layer_norm_1e-5",
        bias: bool = True,
    ):
        super().__init__()
        context.require_kind("tokens", "causal_attention")
        context.require_divisor("heads", heads)
        channels, kv_heads = context.width // heads, heads if kv_heads is None else kv_heads
        if heads % kv_heads:
            raise PartArgumentError("kv_heads", kv_heads, f"a divisor of the {heads} heads")
        if rotary_base is not None and channels % 2:
            raise PartArgumentError("heads", heads, "a number that leaves heads of even width, turned in pairs")
        self.norm = build_token_norm(norm, context.width)
        self.qkv = nn.Linear(context.width, (heads + 2 * kv_heads) * channels, bias)
        self.proj = nn.Linear(context.width, context.width, bias)
        self.drop_path = DropPath(context.drop_path)
        self._heads, self._base, self._factor = (heads, kv_heads, kv_heads), rotary_base, rotary_factor

    def forward(self, x: Tensor, past: Tensor | Past | None = None) -> Tensor:
        if isinstance(past, Tensor):
            raise InputError(
                "causal_attention takes no attention mask. Received: one. Pad texts on the right, where padding changes "
                "nothing, and leave the mask out; a model that makes masks itself needs overrides=['input.padding=null']."
            )
        qkv = self.qkv(self.norm(x)).unflatten(2, (sum(self._heads), -1)).transpose(1, 2)  # (B, M + 2 K, N, C)
        q, k, v = qkv.split(self._heads, 1)
        if self._base is not None:
            start = past.length if past is not None else 0
            turns = _compute_turns((start, start + x.shape[1]), k.shape[-1], self._base, self._factor, x.device)
            q, k = _turn(q, *turns), _turn(k, *turns)
        if past is not None:
            k, v = past.extend(self, k, v)
        # Not every kernel groups queries (enable_gqa), and without one all N x N weights would exist.
        k, v = (t.repeat_interleave(self._heads[0] // self._heads[1], 1) if t.shape[1] < q.shape[1] else t for t in (k, v))
        # Tokens that come after others come one by one, and attend to all of them.
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=x.shape[1] > 1)
        return self.drop_path(self.proj(attended.transpose(1, 2).flatten(2)))


def _compute_turns(
    positions: tuple[int, int], channels: int, base: float, factor: float, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return cosines and sines, (N, C / 2), by which rotary positions, from one to before another, turn pairs of channels."""
    rates = base ** -(torch.arange(0, channels, 2, device=device, dtype=torch.float32) / channels)
    if factor != 1:  # transformers.modeling_rope_utils, "llama3", with the constants of all its checkpoints
        kept = ((rates * 8192 / (2 * pi) - 1) / 3).clamp(0, 1)
        rates = kept * rates + (1 - kept) * rates / factor
    angles = torch.arange(*positions, device=device)[:, None] * rates
    return angles.cos(), angles.sin()


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn channel i of a head with channel i + C / 2, as Transformers does."""
    x1, x2 = x.chunk(2, -1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), -1).to(x.dtype)


@branches.register("decoder_block")
class DecoderBlock(nn.Module):
    """Return what a whole pre-norm decoder block adds to its input: f(x) = A(x) + M(x + A(x)), attention A and MLP M.

    For couplings that take f as one layer of an ordinary network (midpoint, leapfrog). It keeps or runs again twice as much at
    once as `causal_attention` and `mlp` as two steps.

    Shapes: (B, N, D) -> (B, N, D), D divisible by heads; no mask is taken.
    Args:
        heads: number of attention heads.
        kv_heads: heads of keys and values; None: as many.
        rotary_base: base of rotary positions; None: attention knows no positions.
        rotary_factor: by how much these are stretched, as for `causal_attention`.
        norm: norm before the attention and before the MLP.
        bias: whether the linear layers have biases.
        ratio: hidden width of the MLP divided by the width.
        act: activation of the MLP.
        gated: whether the activation is a factor of a second linear layer, as for `mlp`.
    Source: Gal et al. 2025 (arXiv:2512.02056), equation 2.5.
    """

    takes_past = True

    def __init__(
        self,
        context: BuildContext,
        *,
        heads: PositiveInt,
        kv_heads: PositiveInt | None = None,
        rotary_base: PositiveFloat | None = None,
        rotary_factor: PositiveFloat = 1.0,
        norm: TokenNorm = "layer_norm_1e-5",
        bias: bool = True,
        ratio: PositiveFloat = 4.0,
        act: ActivationName = "gelu",
        gated: bool = False,
    ):
        super().__init__()
        self.attention = CausalAttention(
            context, heads=heads, kv_heads=kv_heads, rotary_base=rotary_base, rotary_factor=rotary_factor, norm=norm, bias=bias
        )
        self.mlp = MlpBranch(context, ratio=ratio, act=act, norm=norm, gated=gated, bias=bias)

    def forward(self, x: Tensor, past: Tensor | Past | None = None) -> Tensor:
        attended = self.attention(x, past)
        return attended + self.mlp(x + attended)
