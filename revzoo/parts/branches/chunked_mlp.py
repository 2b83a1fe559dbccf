"""An MLP branch that processes a sequence chunk by chunk."""

import torch
from torch import Tensor

from revzoo.bounds import PositiveFloat, PositiveInt
from revzoo.parts.branches.mlp import MlpBranch
from revzoo.parts.context import BuildContext
from revzoo.parts.layers.norm import Activation, TokenNorm
from revzoo.registry import branches


@branches.register("chunked_mlp")
class ChunkedMlpBranch(MlpBranch):
    """Normalise each token and apply the same MLP to each, one chunk of the sequence after the other.

    The outputs and the parameters are those of `mlp`. Without gradients, only the hidden channels of one chunk exist at a
    time: at most 24 MiB instead of 80 beside the weights (4,096 tokens of 512 channels, float32, 10 chunks).
    Training gains little, because backward recomputes a step whole and autograd then saves the tensors of all chunks at
    once: 120 MiB instead of 136 for a chain of such steps, and nothing in a Reformer, whose peak is in its attention
    (654 MiB).

    Shapes: (B, N, D) -> (B, N, D); a mask of the tokens is accepted and has no effect.
    Args:
        ratio: hidden width divided by the width.
        chunks: number of chunks; a text of fewer tokens gets one chunk per token.
        act: activation between the two linear layers.
        norm: norm before the MLP.
    Source: Reformer (Kitaev et al. 2020), section 3, "chunking"; lucidrains/reformer-pytorch, Chunk and FeedForward.
    """

    def __init__(
        self,
        context: BuildContext,
        *,
        ratio: PositiveFloat = 4.0,
        chunks: PositiveInt = 1,
        act: Activation = "gelu",
        norm: TokenNorm = "layer_norm",
    ):
        super().__init__(context, ratio=ratio, act=act, norm=norm)
        self.chunks = chunks

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        results = [self.mlp(self.norm(chunk)) for chunk in x.chunk(self.chunks, 1)]
        out: Tensor = self.drop_path(torch.cat(results, 1))
        return out
