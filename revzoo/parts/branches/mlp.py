"""The MLP branch: norm, two linear layers, drop path. The coupling adds the residual."""

from timm.layers import LayerScale, Mlp
from torch import Tensor, nn

from revzoo.bounds import PositiveFloat
from revzoo.parts.context import BuildContext
from revzoo.parts.layers.drop_path import DropPath
from revzoo.parts.layers.norm import Activation, TokenNorm, build_token_norm, get_activation
from revzoo.registry import branches


@branches.register("mlp")
class MlpBranch(nn.Module):
    """Normalise each token and apply the same MLP to each.

    Shapes: (B, N, D) -> (B, N, D); a mask of the tokens is accepted and has no effect.
    Args:
        ratio: hidden width divided by the width.
        act: activation between the two linear layers.
        norm: norm before the MLP.
        layer_scale: whether the result is multiplied by a learned factor per channel, initially 1e-5, as in DeiT III.
    Source: Rev-ViT's G (SlowFast `reversible_mvit.py`, MLPSubblock).
    """

    def __init__(
        self,
        context: BuildContext,
        *,
        ratio: PositiveFloat = 4.0,
        act: Activation = "gelu",
        norm: TokenNorm = "layer_norm",
        layer_scale: bool = False,
    ):
        super().__init__()
        context.require_kind("tokens", "mlp")
        context.require_hidden_channel("ratio", ratio)
        self.norm = build_token_norm(norm, context.width)
        self.mlp = Mlp(context.width, int(context.width * ratio), act_layer=get_activation(act))
        self.ls = LayerScale(context.width) if layer_scale else nn.Identity()
        self.drop_path = DropPath(context.drop_path)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        out: Tensor = self.drop_path(self.ls(self.mlp(self.norm(x))))
        return out
