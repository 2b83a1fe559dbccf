"""Drop path whose rate is no constant of compiled code: it grows from block to block, and each value would need a graph."""

import timm.layers
import torch
from torch import Tensor


class DropPath(timm.layers.DropPath):
    """timm's drop path, in eager mode to the bit.

    Shapes: (B, ...) -> (B, ...)
    """

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling() or not self.training or self.drop_prob == 0.0:
            return super().forward(x)
        # timm draws with bernoulli_(rate), for which Dynamo compiles again at every rate. PyTorch 2.11 does the same
        # wherever the rate meets another number before it meets a tensor.
        kept = 1.0 - torch.ones((), device=x.device) * self.drop_prob
        mask = (torch.rand(x.shape[0], *[1] * (x.dim() - 1), device=x.device) + kept).floor()
        return x * (mask / kept if self.scale_by_keep else mask).to(x.dtype)
