"""A part for revzoo in a package of one's own."""

from torch import Tensor, nn

from revzoo.parts import BuildContext
from revzoo.registry import branches


@branches.register("template_mixer")
class TemplateMixer(nn.Module):
    """Mix the tokens of each channel.

    Shapes: x: (B, N, D); returns the same.
    Args:
        hidden: width of the hidden layer.
    """

    def __init__(self, context: BuildContext, *, hidden: int):
        super().__init__()
        context.require_kind("tokens", "template_mixer")
        tokens, width = context.shape.dims
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Sequential(nn.Linear(tokens, hidden), nn.GELU(), nn.Linear(hidden, tokens))

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(self.norm(x).transpose(1, 2)).transpose(1, 2)
