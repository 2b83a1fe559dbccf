"""Norms and activations by the names that specs use; the layers are timm's."""

from typing import Literal

from timm.layers import BatchNormAct2d, get_act_layer, get_norm_layer
from torch import nn

from revzoo.inplace_abn.layer import InPlaceABN2d

TokenNorm = Literal["layer_norm", "layer_norm_1e-5", "rms_norm"]
LeakyNorm = Literal["in_place_abn", "leaky_batch_norm"]
Activation = Literal["gelu", "gelu_tanh", "relu", "silu"]  # gelu_tanh: GELU approximated with tanh


def build_token_norm(name: TokenNorm, width: int) -> nn.Module:
    """Return a norm over the last dimension, eps 1e-6 as in timm's and SlowFast's vision transformers, or 1e-5 as in Swin."""
    layer, eps = ("layer_norm", 1e-5) if name == "layer_norm_1e-5" else (name, 1e-6)
    norm: nn.Module = get_norm_layer(layer.replace("_", ""))(width, eps=eps)
    return norm


def get_activation(name: Activation) -> type[nn.Module]:
    """Return the class of an activation."""
    layer: type[nn.Module] = get_act_layer(name)
    return layer


def build_batch_norm(width: int, momentum: float) -> nn.Module:
    """Return BatchNorm with eps 1e-3, followed by ReLU.

    Source: revnet-public `nnlib.py` (eps 1e-3, moving average decay 0.99, which is momentum 0.01 in PyTorch's terms).
    """
    return BatchNormAct2d(width, eps=1e-3, momentum=momentum, act_layer=nn.ReLU)


def build_leaky_norm(name: LeakyNorm, width: int, slope: float) -> nn.Module:
    """Return BatchNorm followed by leaky ReLU, as one layer that keeps its output alone, or as two."""
    if name == "in_place_abn":
        return InPlaceABN2d(width, slope=slope)
    return BatchNormAct2d(width, act_layer=nn.LeakyReLU, act_kwargs={"negative_slope": slope})
