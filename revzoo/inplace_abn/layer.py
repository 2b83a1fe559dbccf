"""The layer, with the parameters of a BatchNorm."""

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _NormBase

from revzoo.activation import Activation
from revzoo.inplace_abn.backward import spread
from revzoo.inplace_abn.function import Normalised, activate, begin_batch, can_keep_output, normalise, uses_batch
from revzoo.invertible import make_eval_mode_error
from revzoo.noise import compute_norm_alpha


class InPlaceABN2d(_NormBase):
    """BatchNorm and activation, y = act(weight (x - mean) / sqrt(var + eps) + bias), keeping y alone for backward.

    Use it where y is kept anyway, that is before a convolution. Parameters, buffers and state-dict keys are those of
    `nn.BatchNorm2d`, and so is the function, in training and in eval mode. It is not a `torch.nn.BatchNorm2d`, so that nothing
    takes it for one: `convert_sync_batchnorm` would drop the activation. What a compiled model keeps is up to the compiler.

    Shapes: x: (B, C, H, W); returns the same.
    Args:
        channels: C.
        activation: leaky_relu, elu or identity. ReLU cannot be undone.
        slope: of leaky_relu's negative side, or the alpha of elu, > 0.
        eps: added to the variance.
        momentum: weight of the batch in the running statistics; None averages over all batches.
        affine: whether there are weight and bias.
        track_running_stats: whether there are running statistics. Without them eval mode takes the batch's.
    Raises:
        InputError: an activation that cannot be undone, one value per channel; in backward, create_graph=True.
    Source: Rota Bulo et al. 2018, "In-Place Activated BatchNorm", figure 2d.
    """

    def __init__(
        self,
        channels: int,
        activation: Literal["leaky_relu", "elu", "identity"] = "leaky_relu",
        slope: float = 0.01,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
    ):
        super().__init__(channels, eps, momentum, affine, track_running_stats)
        self.activation = Activation(activation, slope)

    def forward(self, x: Tensor) -> Tensor:
        if can_keep_output(self, x):
            return self._activate(x)[0]
        statistics, momentum = begin_batch(self)
        z = F.batch_norm(x, *statistics, self.weight, self.bias, uses_batch(self), momentum, self.eps)
        return self.activation(z)

    def forward_keeping(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return y, mean and 1 / sqrt(var + eps) of each channel, the weak channels, and their normalised input."""
        if not uses_batch(self):
            raise make_eval_mode_error()
        y, normalised = self._activate(x)
        return y, normalised.mean, normalised.inverse_deviation, *normalised.weak

    @torch.no_grad()
    def inverse(self, y: Tensor, mean: Tensor, inverse_deviation: Tensor, *weak: Tensor) -> Tensor:
        """Return x from y and what `forward_keeping` returns after it."""
        x = self.activation.undo(y)
        factor = inverse_deviation.reciprocal()
        shift = mean
        if self.weight is not None:
            factor = factor / self.weight
            shift = mean - self.bias * factor
        x = torch.addcmul(spread(shift, x), x, spread(factor, x), out=x)
        if weak:
            channels, xhat = weak
            kept = torch.addcmul(spread(mean[channels], x), xhat, spread(inverse_deviation[channels].reciprocal(), x))
            x.index_copy_(1, channels, kept.to(x.dtype))
        return x

    def alpha(self, y: Tensor, mean: Tensor, inverse_deviation: Tensor, *weak: Tensor) -> Tensor:
        """Return the product of BatchNorm's alpha and that of the activation."""
        scale, bias = torch.ones_like(mean), torch.zeros_like(mean)
        if self.weight is not None:
            scale, bias = self.weight.detach(), self.bias.detach()
        alpha = compute_norm_alpha(mean, inverse_deviation, scale, bias, noiseless=weak[0] if weak else None)
        return alpha * self.activation.alpha(y)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, activation={self.activation.name}, slope={self.activation.slope:g}"

    def _activate(self, x: Tensor) -> tuple[Tensor, Normalised]:
        with torch.no_grad():
            z, mean, inverse_deviation = normalise(self, x)
        normalised = Normalised(z, mean, inverse_deviation, self.activation, inplace=True, layer=self)
        return activate(normalised, x, self.weight, self.bias), normalised

    def _check_input_dim(self, input: Tensor) -> None:
        pass
