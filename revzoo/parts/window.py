"""Window attention branches: norm, attention in windows, drop path, without the residual, which the coupling is."""

from typing import Literal

import torch
from timm.layers import DropPath
from timm.models.swin_transformer import WindowAttention, get_relative_position_index, window_partition, window_reverse
from torch import Tensor, nn

from revzoo.bounds import PositiveInt
from revzoo.errors import PartArgumentError
from revzoo.parts.context import BuildContext
from revzoo.parts.norm import TokenNorm, token_norm
from revzoo.registry import branches

Sides = tuple[int, int]


@branches.register("window_attention")
class WindowBranch(nn.Module):
    """Attend within windows of normalised tokens, which every other block shifts by half of one.

    The grid is rolled, so that shifted windows at its edges hold tokens of opposite edges; a mask keeps those apart.

    Shapes: (B, H W, D) -> (B, H W, D), (H, W) the token grid, D divisible by heads.
    Args:
        heads: number of attention heads.
        window: side of a window [tokens]; divides the sides of the grid. On a shorter side the window is that side.
        shift: `alternate` shifts in blocks 1, 3, ... of a stage, along sides that are longer than the window; `none` never.
        norm: in front of the attention.
        qkv_bias: whether queries, keys and values have a bias.
    Source: Swin Transformer (Liu et al. 2021), section 3.2, with timm's layers and timm's rule for windows as large as the
        grid (`swin_transformer.py`, SwinTransformerBlock). RevSwin's F, but that one shifts such windows too.
    """

    def __init__(
        self,
        at: BuildContext,
        *,
        heads: PositiveInt,
        window: PositiveInt = 7,
        shift: Literal["alternate", "none"] = "alternate",
        norm: TokenNorm = "layer_norm_1e-5",
        qkv_bias: bool = True,
    ):
        super().__init__()
        at.require("grid", "window_attention")
        if at.width % heads:
            raise PartArgumentError("heads", heads, f"a divisor of the width {at.width}")
        height, width = self.grid = at.sides
        fitting = [k for k in range(1, max(self.grid) + 1) if height % min(k, height) == 0 and width % min(k, width) == 0]
        if window < max(self.grid) and window not in fitting:
            raise PartArgumentError("window", window, f"{', '.join(map(str, fitting))} or more on the {height}x{width} grid")
        self.window: Sides = (min(window, height), min(window, width))
        shifted = shift == "alternate" and at.index % 2 == 1
        self.shift: Sides = (
            self.window[0] // 2 if shifted and height > window else 0,
            self.window[1] // 2 if shifted and width > window else 0,
        )
        self.norm = token_norm(norm, at.width)
        self.attn = WindowAttention(at.width, num_heads=heads, window_size=self.window, qkv_bias=qkv_bias)
        self.drop_path = DropPath(at.drop_path)
        mask = self.constants().get("mask")
        self.register_buffer("mask", None if mask is None else mask.to(torch.get_default_device()), persistent=False)

    def constants(self) -> dict[str, Tensor]:
        """Return the buffers that no file holds, on the CPU: the mask where windows are shifted, and timm's index."""
        with torch.device("cpu"):
            tables = {"attn.relative_position_index": get_relative_position_index(*self.window)}
            if any(self.shift):
                tables["mask"] = _mask(self.grid, self.window, self.shift).to(self.attn.qkv.weight.dtype)
        return tables

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        (down, right), (height, breadth) = self.shift, self.grid
        grid = self.norm(x).view(batch, height, breadth, width)
        if any(self.shift):
            grid = torch.roll(grid, (-down, -right), (1, 2))
        windows = window_partition(grid, self.window).flatten(1, 2)  # (B number, K K, D)
        attended = self.attn(windows, mask=self.mask)
        grid = window_reverse(attended, self.window, height, breadth)
        if any(self.shift):
            grid = torch.roll(grid, (down, right), (1, 2))
        out: Tensor = self.drop_path(grid.reshape(batch, tokens, width))
        return out


def _mask(grid: Sides, window: Sides, shift: Sides) -> Tensor:
    """Return (number of windows, K K, K K): 0, or Swin's -100 between tokens of which one has been rolled past an edge."""
    down, right = (torch.arange(side) >= side - by for side, by in zip(grid, shift, strict=True))
    region = (2.0 * down[:, None] + right)[None, :, :, None]
    region = window_partition(region, window).flatten(1)
    return -100.0 * (region[:, :, None] != region[:, None, :])
