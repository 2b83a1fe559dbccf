"""The attention branch of Swin: norm, attention within windows, drop path. The coupling adds the residual.

B images, H x W grid of tokens, D channels, K side of a window.
"""

from typing import Literal

import torch
from timm.models.swin_transformer import WindowAttention, get_relative_position_index, window_partition, window_reverse
from torch import Tensor, nn

from revzoo.bounds import PositiveInt
from revzoo.errors import PartArgumentError
from revzoo.parts.context import BuildContext
from revzoo.parts.layers.convolution import TokenNorm, build_token_norm
from revzoo.parts.layers.drop_path import DropPath
from revzoo.registry import branches

Sides = tuple[int, int]


@branches.register("window_attention")
class WindowBranch(nn.Module):
    """Normalise the tokens and let each attend within its window; every other block shifts the windows by half a window.

    Shifting rolls the grid, so a window at an edge also contains tokens of the opposite edge. A mask keeps the two apart.

    Shapes: (B, H W, D) -> (B, H W, D), (H, W) the token grid, D divisible by heads.
    Args:
        heads: number of attention heads.
        window: side of a window [tokens]. Where it does not divide the sides of the grid, it is the nearest that does, if that
            is more than half of it; where a side is shorter, the window is that side.
        shift: `alternate` shifts in blocks 1, 3, ... of a stage, along sides that are longer than the window; `none` never.
        norm: norm before the attention.
        qkv_bias: whether queries, keys and values have a bias.
    Source: Swin Transformer (Liu et al. 2021), section 3.2, with timm's layers. As in timm (`swin_transformer.py`,
        SwinTransformerBlock), windows as large as the grid are not shifted; RevSwin's F shifts those too.
    """

    def __init__(
        self,
        context: BuildContext,
        *,
        heads: PositiveInt,
        window: PositiveInt = 7,
        shift: Literal["alternate", "none"] = "alternate",
        norm: TokenNorm = "layer_norm_1e-5",
        qkv_bias: bool = True,
    ):
        super().__init__()
        context.require_kind("grid", "window_attention")
        context.require_divisor("heads", heads)
        height, width = self.grid = context.sides
        fitting = [k for k in range(1, max(self.grid) + 1) if height % min(k, height) == 0 and width % min(k, width) == 0]
        if window < max(self.grid) and window not in fitting:
            nearest = min(fitting, key=lambda side: abs(side - window))
            if 2 * nearest <= window:  # too little would be left of the attention
                raise PartArgumentError(
                    "window", window, f"{', '.join(map(str, fitting))} or more on the {height}x{width} grid"
                )
            window = nearest
        self.window: Sides = (min(window, height), min(window, width))
        shifted = shift == "alternate" and context.index % 2 == 1
        self.shift: Sides = (
            self.window[0] // 2 if shifted and height > window else 0,
            self.window[1] // 2 if shifted and width > window else 0,
        )
        self.norm = build_token_norm(norm, context.width)
        self.attn = WindowAttention(context.width, num_heads=heads, window_size=self.window, qkv_bias=qkv_bias)
        self.drop_path = DropPath(context.drop_path)
        mask = self.build_constants().get("mask")
        self.register_buffer("mask", None if mask is None else mask.to(torch.get_default_device()), persistent=False)

    def build_constants(self) -> dict[str, Tensor]:
        """Return the buffers that no checkpoint holds, on the CPU: timm's index and, for shifted windows, the mask."""
        with torch.device("cpu"):
            tables = {"attn.relative_position_index": get_relative_position_index(*self.window)}
            if any(self.shift):
                tables["mask"] = _build_mask(self.grid, self.window, self.shift).to(self.attn.qkv.weight.dtype)
        return tables

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, channels = x.shape
        (down, right), (height, width) = self.shift, self.grid
        grid = self.norm(x).view(batch, height, width, channels)
        if any(self.shift):
            grid = torch.roll(grid, (-down, -right), (1, 2))
        windows = window_partition(grid, self.window).flatten(1, 2)  # (B times number of windows, K K, D)
        attended = self.attn(windows, mask=self.mask)
        grid = window_reverse(attended, self.window, height, width)
        if any(self.shift):
            grid = torch.roll(grid, (down, right), (1, 2))
        return self.drop_path(grid.reshape(batch, tokens, channels))


def _build_mask(grid: Sides, window: Sides, shift: Sides) -> Tensor:
    """Return (number of windows, K K, K K): Swin's -100 between two tokens if only one was rolled past an edge, else 0."""
    down, right = (torch.arange(side) >= side - by for side, by in zip(grid, shift, strict=True))
    region = (2.0 * down[:, None] + right)[None, :, :, None]
    region = window_partition(region, window).flatten(1)
    return -100.0 * (region[:, :, None] != region[:, None, :])
