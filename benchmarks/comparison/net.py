"""The two networks that every method runs: chains of additive blocks y1 = x1 + F(x2), y2 = x2 + G(y1)."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Net:
    """A chain of equal blocks, not yet made.

    Args:
        name: name in the tables.
        make_block: function of the rate of dropout that returns the F and G of a new block.
        shape: shape of a stream.
        features: dimension along which one tensor is split into the two streams.
    """

    name: str
    make_block: Callable[..., list[nn.Module]]
    shape: tuple[int, ...]
    features: int

    def make_steps(self, depth: int, dropout: float = 0.0) -> list[nn.Module]:
        """Return F and G of this many blocks, with the same weights at every call."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return [step for _ in range(depth) for step in self.make_block(dropout=dropout)]

    def make_pair(self, seed: int = 1, dtype: torch.dtype = torch.float32) -> Pair:
        """Return two streams with normally distributed values."""
        generator = torch.Generator().manual_seed(seed)
        x1, x2 = (torch.randn(self.shape, generator=generator, dtype=dtype) for _ in range(2))
        return x1, x2

    @property
    def stream_bytes(self) -> int:
        """The bytes of one stream in float32."""
        return 4 * torch.Size(self.shape).numel()


class Attention(nn.Module):
    """LayerNorm and self-attention.

    Shapes: x: (B, N, D), returned likewise.
    Args:
        width: D.
        heads: divides D.
        dropout: rate at the output.
    """

    def __init__(self, width: int, heads: int, dropout: float = 0.0):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.heads = heads
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        out: Tensor = self.dropout(self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)))
        return out


def make_transformer_block(width: int, heads: int, dropout: float = 0.0) -> list[nn.Module]:
    """Return LayerNorm and attention, and LayerNorm and an MLP of four times the width."""
    mlp = [nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)]
    return [Attention(width, heads, dropout), nn.Sequential(*mlp, *_make_dropout(dropout))]


def make_conv_block(width: int, dropout: float = 0.0) -> list[nn.Module]:
    """Return twice two units of BatchNorm, ReLU and a convolution of 3 x 3."""

    def unit() -> tuple[nn.Module, ...]:
        return nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1, bias=False)

    return [nn.Sequential(*unit(), *unit(), *_make_dropout(dropout)) for _ in range(2)]


def _make_dropout(rate: float) -> list[nn.Module]:
    return [nn.Dropout(rate)] if rate else []


NETS = (
    Net("transformer", partial(make_transformer_block, 192, 3), (8, 197, 192), features=-1),
    Net("conv", partial(make_conv_block, 32), (32, 32, 32, 32), features=1),
)
SMALL_NETS = (
    Net("transformer", partial(make_transformer_block, 48, 2), (4, 17, 48), features=-1),
    Net("conv", partial(make_conv_block, 6), (4, 6, 8, 8), features=1),
)
