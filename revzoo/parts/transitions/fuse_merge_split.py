"""The transition of Rev-Swins: fuse the streams, merge neighbouring tokens, and split again.

B images, H x W grid of tokens, C channels per stream.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from timm.layers import Mlp
from timm.models.swin_transformer import PatchMerging
from torch import Tensor, nn

from revzoo.bounds import PositiveFloat
from revzoo.errors import PartArgumentError
from revzoo.parts.context import BuildContext, Shape
from revzoo.parts.layers.convolution import build_token_norm
from revzoo.parts.layers.join import Join, join_streams
from revzoo.registry import transitions


@transitions.register("fuse_merge_split")
class FuseMergeSplit(nn.Module):
    """Fuse the streams to the width of one, merge 2x2 neighbouring tokens, and give the result to both streams.

    Shapes: x1, x2: (B, H W, C), H and W even -> y1 = y2: (B, H W / 4, width).
    Args:
        fuse: `mean` averages the streams; `last` takes x2, the newer one, alone; `mlp` is an MLP of their concatenation with
            widths 2 C, fuse_ratio C and C; `proj` is LayerNorm and a linear map of the concatenation, initially near the mean.
        fuse_ratio: hidden width of that MLP divided by C; the authors measured with 2.
        down: `patch_merging` is LayerNorm of four concatenated tokens, then a linear map to `width`.
    Source: PaReprop's Rev-Swin (RevSwin `models/reversible_swin2.py` and `common.py`: avg, concat_linear_{fuse_ratio}, proj).
        `last` is Swin's own merging: a network converted with `momentum` or `dual_residual` starts as the original, x2 being
        the original's activation and x1 an earlier one.
    """

    def __init__(
        self,
        context: BuildContext,
        *,
        fuse: Literal["mean", "last", "mlp", "proj"] = "mean",
        fuse_ratio: PositiveFloat = 2.0,
        down: Literal["patch_merging"] = "patch_merging",
    ):
        super().__init__()
        context.require_kind("grid", "fuse_merge_split")
        width, size = context.shape.width, context.sides
        if any(side % 2 for side in size):
            raise PartArgumentError("down", down, f"a grid of even sides; {size[0]}x{size[1]} tokens arrive")
        if fuse == "mlp":
            context.require_hidden_channel("fuse_ratio", fuse_ratio, width)
        self.grid = size
        self.out_shape = Shape(context.width, (size[0] // 2, size[1] // 2), "tokens")
        self._join: Join = "last" if fuse == "last" else "mean"  # used where the fusion has no parameters
        self.fuse: nn.Module | None = None
        if fuse == "mlp":
            self.fuse = Mlp(2 * width, int(fuse_ratio * width), width)
        elif fuse == "proj":
            self.fuse = _Projection(width)
        self.down = PatchMerging(width, context.width)

    def forward(self, x1: Tensor, x2: Tensor) -> tuple[Tensor, Tensor]:
        merged = self.down(self._fuse_streams(x1, x2).unflatten(1, self.grid)).flatten(1, 2)
        return merged, merged

    def _fuse_streams(self, x1: Tensor, x2: Tensor) -> Tensor:
        if self.fuse is None:
            return join_streams(x1, x2, self._join)
        return self.fuse(torch.cat((x1, x2), dim=2))


class _Projection(nn.Module):
    """LayerNorm of the concatenated streams, then a linear map whose weight begins as half the identity on each, plus noise.

    The weight is not held by an nn.Linear, so that the network's initialisation, which runs later, leaves it as it is.
    """

    def __init__(self, width: int):
        super().__init__()
        self.norm = build_token_norm("layer_norm_1e-5", 2 * width)
        self.weight = nn.Parameter(torch.empty(width, 2 * width))
        nn.init.trunc_normal_(self.weight, std=0.02)
        with torch.no_grad():
            self.weight.add_(torch.eye(width).repeat(1, 2), alpha=0.5)

    def forward(self, streams: Tensor) -> Tensor:
        return F.linear(self.norm(streams), self.weight)
