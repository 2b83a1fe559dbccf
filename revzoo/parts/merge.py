"""The transition of hierarchical transformers: the streams become one, shrink, and are two again."""

from typing import Literal

import torch
import torch.nn.functional as F
from timm.layers import Mlp
from timm.models.swin_transformer import PatchMerging
from torch import Tensor, nn

from revzoo.bounds import PositiveFloat
from revzoo.errors import PartArgumentError
from revzoo.parts.context import BuildContext, Shape, joined
from revzoo.parts.norm import token_norm
from revzoo.registry import transitions


@transitions.register("fuse_merge_split")
class FuseMergeSplit(nn.Module):
    """Fuse the streams to the width of one, merge 2x2 neighbouring tokens, and hand the result to both.

    Shapes: x1, x2: (B, H W, C), H and W even -> twice the same (B, H W / 4, width).
    Args:
        fuse: `mean` of the streams; `last` is the newer one, x2, alone; `mlp` from both (2C, fuse_ratio C, C); `proj`, a
            linear map of both after LayerNorm that begins near their mean.
        fuse_ratio: hidden width of that MLP over C; the authors measured with 2.
        down: `patch_merging`: LayerNorm of four tokens side by side, then a linear map to `width`.
    Source: PaReprop's Rev-Swin (RevSwin `models/reversible_swin2.py` and `common.py`: avg, concat_linear_{fuse_ratio}, proj).
        With `last` it is Swin's own merging, for couplings that begin as an ordinary network.
    """

    def __init__(
        self,
        at: BuildContext,
        *,
        fuse: Literal["mean", "last", "mlp", "proj"] = "mean",
        fuse_ratio: PositiveFloat = 2.0,
        down: Literal["patch_merging"] = "patch_merging",
    ):
        super().__init__()
        width, size = at.shape.width, at.shape.size
        at.require("grid", "fuse_merge_split")
        if any(side % 2 for side in size):
            raise PartArgumentError("down", down, f"a grid of even sides; {size[0]}x{size[1]} tokens arrive")
        if fuse == "mlp" and width * fuse_ratio < 1:
            raise PartArgumentError("fuse_ratio", fuse_ratio, f"a ratio that leaves a hidden channel of the width {width}")
        self.grid = size
        self.out_shape = Shape(at.width, (size[0] // 2, size[1] // 2), "tokens")
        self._join: Literal["mean", "last"] = "last" if fuse == "last" else "mean"  # without a module
        self.fuse: nn.Module | None = None
        if fuse == "mlp":
            self.fuse = Mlp(2 * width, int(fuse_ratio * width), width)
        elif fuse == "proj":
            self.fuse = _Projection(width)
        self.down = PatchMerging(width, at.width)

    def forward(self, x1: Tensor, x2: Tensor) -> tuple[Tensor, Tensor]:
        merged = self.down(self._fused(x1, x2).unflatten(1, self.grid)).flatten(1, 2)
        return merged, merged

    def _fused(self, x1: Tensor, x2: Tensor) -> Tensor:
        if self.fuse is None:
            return joined(x1, x2, self._join)
        fused: Tensor = self.fuse(torch.cat((x1, x2), dim=2))
        return fused


class _Projection(nn.Module):
    """LayerNorm of both streams side by side, then a linear map that begins as half the identity on each, and noise.

    Its weight is no nn.Linear's, so a network's initialisation, which comes later, leaves it alone.
    """

    def __init__(self, width: int):
        super().__init__()
        self.norm = token_norm("layer_norm_1e-5", 2 * width)
        self.weight = nn.Parameter(torch.empty(width, 2 * width))
        nn.init.trunc_normal_(self.weight, std=0.02)
        with torch.no_grad():
            self.weight.add_(torch.eye(width).repeat(1, 2), alpha=0.5)

    def forward(self, streams: Tensor) -> Tensor:
        return F.linear(self.norm(streams), self.weight)
