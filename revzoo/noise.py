"""By how much inverting a function changes the ratio of signal to noise: its alpha.

The ratio is that of the mean squares. Noise of relative size e in y is noise of relative size e / sqrt(alpha) in the x that is
rebuilt from it. The formulas are for noise that is the same in all elements of y; all tensors may be samples.

Source: Hascoet et al. 2023, "Reversible designs for extreme memory cost reduction of CNN training", section 4.1.
"""

import torch
from torch import Tensor


def compute_elementwise_alpha(x: Tensor, y: Tensor, slope: Tensor) -> Tensor:
    """Return alpha of a function of single elements that makes y of x, where dx / dy is `slope`."""
    size_x, size_y, size_of_slope = (torch.linalg.vector_norm(each) for each in (x, y, slope))
    ratio: Tensor = size_x / (size_y * size_of_slope)
    return ratio.square() * slope.numel()


def compute_norm_alpha(mean: Tensor, inverse_deviation: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """Return alpha of y = g (x - m) / sqrt(v) + b for C channels: C sum(v + m^2) / (sum(v / g^2) sum(g^2 + b^2)).

    Args:
        mean: m of each channel.
        inverse_deviation: 1 / sqrt(v) of each channel.
        scale: g of each channel.
        bias: b of each channel.
    """
    square, variance = scale.square(), inverse_deviation.square().reciprocal()
    signals = (variance + mean.square()).sum() / (square + bias.square()).sum()
    return scale.numel() * signals / (variance / square).sum()


def estimate_alpha_of_addition(x1: Tensor, x2: Tensor, out: Tensor, y1: Tensor) -> Tensor:
    """Return alpha of (x1, x2) -> (x2, y1), y1 = x1 + out, out = f(x2): f amplifies noise as it amplifies x2.

    Each tensor may be a sample, of the same places. The assumption holds for linear f where x2 is like noise. Trained
    convolutions amplify signals more than noise, so that alpha is a little higher.
    """
    first, second, added, summed = (torch.linalg.vector_norm(each).square() for each in (x1, x2, out, y1))
    return (first + second) / ((summed + second) * (1 + added / (2 * second)))
