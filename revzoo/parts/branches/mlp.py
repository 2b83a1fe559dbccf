"""Two linear layers and an activation between them, with the parameter names of timm or of Transformers."""

from timm.layers import LayerScale, Mlp, SwiGLU
from torch import Tensor, nn

from revzoo.bounds import PositiveFloat, Rate
from revzoo.parts.context import BuildContext
from revzoo.parts.layers.bert_sub_block import BertSubBlock, NormPosition
from revzoo.parts.layers.convolution import ActivationName, TokenNorm, build_token_norm, get_activation
from revzoo.parts.layers.drop_path import DropPath
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
        gated: whether hidden channels are multiplied by act of a second linear layer, instead of passing through act (SwiGLU).
        bias: whether the linear layers have biases.
    Source: Rev-ViT's G (SlowFast `reversible_mvit.py`, MLPSubblock); gated: Shazeer 2020, as in Llama.
    """

    acts_on = "tokens"  # one by one, so that it may be cut along them into tiles
    takes_past = True  # which a network hands to steps that see no later tokens when it continues a text; without effect here

    def __init__(
        self,
        context: BuildContext,
        *,
        ratio: PositiveFloat = 4.0,
        act: ActivationName = "gelu",
        norm: TokenNorm = "layer_norm",
        layer_scale: bool = False,
        gated: bool = False,
        bias: bool = True,
    ):
        super().__init__()
        context.require_kind("tokens", "mlp")
        context.require_hidden_channel("ratio", ratio)
        self.norm = build_token_norm(norm, context.width)
        make = SwiGLU if gated else Mlp
        self.mlp = make(context.width, int(context.width * ratio), act_layer=get_activation(act), bias=bias)
        self.ls = LayerScale(context.width) if layer_scale else nn.Identity()
        self.drop_path = DropPath(context.drop_path)

    def forward(self, x: Tensor, mask: object = None) -> Tensor:
        return self.drop_path(self.ls(self.mlp(self.norm(x))))


@branches.register("feed_forward")
class FeedForwardBranch(BertSubBlock):
    """Apply the same MLP to each token.

    Shapes: (B, N, D) -> (B, N, D); a mask of the tokens is accepted and has no effect.
    Args:
        ratio: hidden width divided by the width.
        act: activation between the two linear layers.
        norm_position: `post` is LayerNorm(x + change), with a residual inside; `pre` is the change computed from LayerNorm(x).
        eps: eps of the LayerNorm.
        dropout: probability of dropping a channel of the change, in [0, 1).
    Source: Transformers' BertIntermediate and BertOutput, and RoBERTa's; post as G in MEFT (Liao et al. 2023).
    """

    acts_on = "tokens"
    takes_past = True  # without effect, as above

    def __init__(
        self,
        context: BuildContext,
        *,
        ratio: PositiveFloat = 4.0,
        act: ActivationName = "gelu",
        norm_position: NormPosition = "post",
        eps: PositiveFloat = 1e-5,
        dropout: Rate = 0.0,
    ):
        context.require_hidden_channel("ratio", ratio)
        hidden = int(context.width * ratio)
        super().__init__(context, "feed_forward", hidden, norm_position, eps, dropout)
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(context.width, hidden)})
        self.act = get_activation(act)()

    def _inner(self, x: Tensor, mask: Tensor | None) -> Tensor:
        return self.act(self.intermediate["dense"](x))
