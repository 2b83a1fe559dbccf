"""Layers with an inverse, for networks that rebuild their activations layer by layer.

A layer is any module with `inverse`: `layer.inverse(layer(x))` is x up to rounding. If the inverse needs more than the output,
such as the statistics of a batch, `forward_keeping` returns that and `inverse` takes it:

    y, *kept = layer.forward_keeping(x)
    x = layer.inverse(y, *kept)

The layers know no modes and keep nothing on themselves. How a forward is run without storing x is told in
`revzoo/runtime/layerwise.py`. A `Bijection` is a layer without parameters and rounding.

A layer that treats each channel by itself may say so with `is_channelwise = True`. Then it may be run on one half of the
channels after the other, which takes half as much memory in addition to a gradient. If the layer has `forward_keeping`, this
and `inverse` take an argument `channels`: a slice, the channels that the input consists of.

A layer may have `alpha(y, *kept)`: by how much its inverse changes the ratio of signal to noise (`revzoo/noise.py`), from a
sample of the elements of y.

Source: Hascoet et al. 2023, "Reversible designs for extreme memory cost reduction of CNN training", section 4.2.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _NormBase

from revzoo.dtype import match_dtype
from revzoo.errors import InputError
from revzoo.noise import compute_elementwise_alpha, compute_norm_alpha

_ALL = slice(None)


class InvertibleLeakyReLU(nn.Module):
    """y = x where x > 0, else slope * x.

    Shapes: any; returns the same.
    Args:
        slope: of the negative side, > 0. The nearer to 1, the less the inverse amplifies noise.
    Raises:
        InputError: slope <= 0, which cannot be undone.
    """

    is_channelwise = True

    def __init__(self, slope: float = 0.2):
        super().__init__()
        if not slope > 0:
            raise InputError(f"A slope <= 0 cannot be undone. Received: {slope}. Use 0.1, or nn.ReLU, which is stored.")
        self.slope = slope

    def forward(self, x: Tensor) -> Tensor:
        return F.leaky_relu(x, self.slope)

    def inverse(self, y: Tensor) -> Tensor:
        """Return x."""
        return F.leaky_relu(y, 1 / self.slope)

    def alpha(self, y: Tensor) -> Tensor:
        """Return 4 / ((1 + n^2) (1 + 1 / n^2)) where half of y is negative, in general as `compute_elementwise_alpha`."""
        return compute_elementwise_alpha(self.inverse(y), y, torch.where(y < 0, 1 / self.slope, 1.0))

    def extra_repr(self) -> str:
        return f"slope={self.slope:g}"


class InvertibleBatchNorm2d(_NormBase):
    """BatchNorm with a floor under its scale: y = (|weight| + eps_i) (x - mean) / sqrt(var + eps) + bias.

    In eval mode the running statistics take the place of the batch's, as in `nn.BatchNorm2d`, and there is no inverse. It is
    not a `torch.nn.BatchNorm2d`, so that nothing takes it for one: `convert_sync_batchnorm` would drop the floor.

    Shapes: x: (B, C, H, W); returns the same.
    Args:
        channels: C.
        eps_i: the floor, >= 0. It limits the noise that the inverse amplifies by 1 / (|weight| + eps_i).
        eps: added to the variance.
        momentum: weight of the batch in the running statistics.
    Raises:
        InputError: eps_i < 0, one value per channel; to invert it, eval mode, or eps_i = 0 and a weight that is 0.
    Source: Hascoet et al. 2023, section 4.2.1.
    """

    is_channelwise = True
    momentum: float
    weight: nn.Parameter
    bias: nn.Parameter
    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def __init__(self, channels: int, eps_i: float = 0.1, eps: float = 1e-5, momentum: float = 0.1):
        super().__init__(channels, eps, momentum)
        if not eps_i >= 0:
            raise InputError(f"eps_i is a floor under |weight|, at least 0. Received: {eps_i}.")
        self.eps_i = eps_i

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            return self._normalise(x)[0]
        return F.batch_norm(x, self.running_mean, self.running_var, self._scale(), self.bias, eps=self.eps)

    def forward_keeping(self, x: Tensor, channels: slice = _ALL) -> tuple[Tensor, Tensor, Tensor]:
        """Return y, and mean and 1 / sqrt(var + eps) of each channel of the batch."""
        if not self.training:
            raise make_eval_mode_error()
        # Reading a number would wait for a device; there, what inversion makes of it is noticed in backward.
        if self.eps_i == 0 and self.weight.is_cpu and not self.weight.all():
            zeros = int((self.weight == 0).sum())
            raise InputError(
                f"A BatchNorm with eps_i = 0 has no inverse where its weight is 0. Received: {zeros} of {self.num_features} "
                "weights at 0. Use eps_i > 0, for example 0.1."
            )
        y, mean, inverse_deviation = self._normalise(x, channels)
        return y, mean.detach(), inverse_deviation.detach()

    def inverse(self, y: Tensor, mean: Tensor, inverse_deviation: Tensor, channels: slice = _ALL) -> Tensor:
        """Return x from y and what `forward_keeping` returns after it."""
        factor = (self._scale(channels) * inverse_deviation).reciprocal()
        shift = mean - _pick(self.bias, channels) * factor
        shift, factor = (each.to(y.dtype).view(1, -1, *[1] * (y.dim() - 2)) for each in (shift, factor))
        return torch.addcmul(shift, y, factor)  # in one pass

    def alpha(self, y: Tensor, mean: Tensor, inverse_deviation: Tensor) -> Tensor:
        """Return `compute_norm_alpha`."""
        return compute_norm_alpha(mean, inverse_deviation, self._scale().detach(), self.bias.detach())

    def extra_repr(self) -> str:
        return f"{self.num_features}, eps_i={self.eps_i:g}, eps={self.eps:g}, momentum={self.momentum:g}"

    def _scale(self, channels: slice = _ALL) -> Tensor:
        return _pick(self.weight, channels).abs() + self.eps_i

    def _normalise(self, x: Tensor, channels: slice = _ALL) -> tuple[Tensor, Tensor, Tensor]:
        refuse_one_value(x)
        if not channels.start:
            self.num_batches_tracked.add_(1)
        bias, mean, var = (_pick(each, channels) for each in (self.bias, self.running_mean, self.running_var))
        y, mean, inverse_deviation = torch.native_batch_norm(
            x, self._scale(channels), bias, mean, var, True, self.momentum, self.eps
        )
        return y, mean, inverse_deviation


def refuse_one_value(x: Tensor) -> None:
    """Raise InputError if a BatchNorm in training has one value per channel, whose variance is 0."""
    if x.numel() == x.size(1):
        raise InputError(
            f"BatchNorm needs more than one value per channel in training. Received: {tuple(x.shape)}. Use a larger batch, or "
            "larger images."
        )


def make_eval_mode_error() -> InputError:
    """Return the error for a BatchNorm that is to be inverted in eval mode."""
    return InputError(
        "BatchNorm in eval mode does not use the statistics of the batch, and its input is not rebuilt. Call "
        "model.train(), use torch.no_grad() for inference, or set the schedule of this layer or step to 'store'."
    )


def _pick(values: Tensor, channels: slice) -> Tensor:
    return values if channels is _ALL else values[channels]


class Coupled(nn.Module):
    """An invertible layer from any two functions of half the channels: y1 = x1 + f(x2), y2 = x2 + g(y1).

    Shapes: x: (B, C, ...), C even; f and g map (B, C / 2, ...) to the same. Returns the same as x.
    Raises:
        InputError: an odd number of channels.
    """

    def __init__(self, f: nn.Module, g: nn.Module):
        super().__init__()
        self.f, self.g = f, g

    def forward(self, x: Tensor) -> Tensor:
        x1, x2 = halve(x)
        y1 = add(x1, self.f(x2))
        return join_halves(y1, add(x2, self.g(y1)))

    def inverse(self, y: Tensor) -> Tensor:
        """Return x."""
        y1, y2 = halve(y)
        x2 = subtract(y2, self.g(y1))
        return join_halves(subtract(y1, self.f(x2)), x2)


class CoupledConv2d(Coupled):
    """An invertible convolution: a coupling of two convolutions of half the channels, without bias.

    Shapes: (B, channels, H, W); returns the same.
    Args:
        channels: even.
        kernel_size: odd, so that the images keep their size.
    Source: Hascoet et al. 2023, section 4.2.3.
    """

    def __init__(self, channels: int, kernel_size: int = 3):
        if channels < 2 or channels % 2:
            raise InputError(f"A coupled convolution halves its channels, so their number is even. Received: {channels}.")
        if kernel_size % 2 == 0:
            raise InputError(f"A kernel of an odd size keeps the size of the images. Received: {kernel_size}.")

        def conv() -> nn.Module:
            return nn.Conv2d(channels // 2, channels // 2, kernel_size, padding=kernel_size // 2, bias=False)

        super().__init__(conv(), conv())


def halve(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return copies of both halves of the channels: a view would keep the other half alive.

    Shapes: x: (B, C, ...), C even; returns two of (B, C / 2, ...).
    Raises:
        InputError: an odd number of channels.
    """
    if x.size(1) % 2:
        raise InputError(f"Two halves need an even number of channels. Received: {x.size(1)}.")
    x1, x2 = x.chunk(2, 1)
    return x1.clone(), x2.clone()


def join_halves(x1: Tensor, x2: Tensor) -> Tensor:
    """Return one tensor from its halves.

    Shapes: x1, x2: (B, C / 2, ...); returns (B, C, ...).
    """
    return torch.cat((x1, x2), 1)


def add(x: Tensor, out: Tensor, in_place: bool = False) -> Tensor:
    """Return x + out in the dtype of x, in new memory or in that of x."""
    out = match_dtype(out, x)
    return x.add_(out) if in_place else x + out


def subtract(y: Tensor, out: Tensor, in_place: bool = False) -> Tensor:
    """Return y - out in the dtype of y, in new memory or in that of y."""
    out = match_dtype(out, y)
    return y.sub_(out) if in_place else y - out
