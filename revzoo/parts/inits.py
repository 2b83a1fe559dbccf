"""Initialisations that a spec may name; the builder calls one on every module of a new network."""

from math import sqrt

from torch import nn

from revzoo.bounds import FiniteFloat, PositiveFloat
from revzoo.registry import inits

_PIECE = 2**20  # numbers that are drawn at once: to find what to draw again, PyTorch keeps masks of them all


@inits.register("truncated_normal")
class TruncatedNormal:
    """Draw linear weights from a normal, cut at -2 and 2; set the biases of linear layers and norms.

    The cuts are values, so that with a std of 0.02 the weights have that standard deviation. Cut at two deviations they would
    have 0.0176.

    Args:
        std: standard deviation of the normal before truncation.
        bias: value of the biases of linear layers and LayerNorms.
        convolutions: whether the weights of convolutions are drawn in the same way.
    Source: SlowFast (with convolutions) and RevSwin use std 0.02 and bias 0.02; PyTorch's `trunc_normal_` cuts at -2 and 2.
    """

    def __init__(self, *, std: PositiveFloat = 0.02, bias: FiniteFloat = 0.0, convolutions: bool = False):
        self.std, self.bias = std, bias
        self.drawn = (nn.Linear, nn.Conv2d) if convolutions else (nn.Linear,)

    def __call__(self, module: nn.Module) -> None:
        if isinstance(module, self.drawn):
            for piece in module.weight.data.view(-1).split(_PIECE):
                nn.init.trunc_normal_(piece, std=self.std)
        if isinstance(module, (nn.Linear, nn.LayerNorm)) and module.bias is not None:
            nn.init.constant_(module.bias, self.bias)


@inits.register("fan_in")
class FanIn:
    """Draw linear weights from a normal of variance 1 / inputs, truncated at two standard deviations; set biases to 0.

    Source: LeCun et al. (1998), "Efficient BackProp", section 4.6; for small networks, where a std of 0.02 is too little.
    """

    def __call__(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            std = module.in_features**-0.5
            nn.init.trunc_normal_(module.weight, std=std, a=-2.0 * std, b=2.0 * std)
            if module.bias is not None:
                nn.init.zeros_(module.bias)


@inits.register("fan_out")
class FanOut:
    """Draw convolutions from a truncated normal of variance 2 / (k^2 * output channels), linear weights uniformly.

    Source: revnet-public `nnlib.py` and `resnet_model.py`: truncated normal for convolutions, uniform unit scaling
        (within sqrt(3 / inputs)) for the classifier.
    """

    def __call__(self, module: nn.Module) -> None:
        if isinstance(module, nn.Conv2d):
            std = sqrt(2.0 / (module.kernel_size[0] * module.kernel_size[1] * module.out_channels))
            nn.init.trunc_normal_(module.weight, std=std, a=-2.0 * std, b=2.0 * std)
        elif isinstance(module, nn.Linear):
            bound = sqrt(3.0 / module.in_features)
            nn.init.uniform_(module.weight, -bound, bound)
            nn.init.zeros_(module.bias)


@inits.register("normal")
class Normal:
    """Draw weights of linear layers and embeddings from a normal; biases and the embedding of padding start at 0.

    Args:
        std: standard deviation of the normal.
    Source: BERT (Devlin et al. 2019, `modeling.py`, initializer_range 0.02), as Transformers initialises its models.
    """

    def __init__(self, *, std: PositiveFloat = 0.02):
        self.std = std

    def __call__(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=self.std)
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            nn.init.zeros_(module.weight.data[module.padding_idx])
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
