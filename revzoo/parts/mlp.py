"""MLP branches: norm, two linear layers, drop path, without the residual, which the coupling is."""

from timm.layers import DropPath, LayerScale, Mlp
from torch import Tensor, nn

from revzoo.bounds import PositiveFloat
from revzoo.errors import PartArgumentError
from revzoo.parts.context import BuildContext
from revzoo.parts.norm import Activation, TokenNorm, activation, token_norm
from revzoo.registry import branches


@branches.register("mlp")
class MlpBranch(nn.Module):
    """Transform each normalised token by itself.

    Shapes: (B, N, D) -> (B, N, D); a mask of the tokens changes nothing.
    Args:
        ratio: hidden width over width.
        act: activation between the two linear layers.
        norm: in front.
        layer_scale: whether the result is multiplied by a learned factor per channel, at first 1e-5, as in DeiT III.
    Source: Rev-ViT's G (SlowFast `reversible_mvit.py`, MLPSubblock).
    """

    def __init__(
        self,
        at: BuildContext,
        *,
        ratio: PositiveFloat = 4.0,
        act: Activation = "gelu",
        norm: TokenNorm = "layer_norm",
        layer_scale: bool = False,
    ):
        super().__init__()
        at.require("tokens", "mlp")
        if at.width * ratio < 1:
            raise PartArgumentError("ratio", ratio, f"a ratio that leaves a hidden channel of the width {at.width}")
        self.norm = token_norm(norm, at.width)
        self.mlp = Mlp(at.width, int(at.width * ratio), act_layer=activation(act))
        self.ls = LayerScale(at.width) if layer_scale else nn.Identity()
        self.drop_path = DropPath(at.drop_path)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        out: Tensor = self.drop_path(self.ls(self.mlp(self.norm(x))))
        return out
