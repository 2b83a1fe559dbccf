"""The norm and activation behind a convolution of a network that is inverted layer by layer."""

from collections.abc import Iterator

from torch import nn

from revzoo.invertible import CoupledConv2d, InvertibleBatchNorm2d, InvertibleLeakyReLU


def list_norm_and_activation(width: int, slope: float, eps_i: float) -> Iterator[tuple[str, nn.Module]]:
    """Yield an invertible BatchNorm and LeakyReLU with their names."""
    yield "norm", InvertibleBatchNorm2d(width, eps_i)
    yield "act", InvertibleLeakyReLU(slope)


def list_unit_layers(width: int, slope: float, eps_i: float) -> Iterator[tuple[str, nn.Module]]:
    """Yield the three layers of an invertible unit with their names."""
    yield "conv", CoupledConv2d(width)
    yield from list_norm_and_activation(width, slope, eps_i)
