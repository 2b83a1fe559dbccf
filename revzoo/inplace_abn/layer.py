"""The layer, with the parameters of a BatchNorm."""

from torch import Tensor
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _NormBase

from revzoo.errors import InputError
from revzoo.inplace_abn.function import InPlaceABNFunction, begin_batch, can_keep_output, uses_batch


class InPlaceABN2d(_NormBase):
    """BatchNorm and leaky ReLU, y = act(weight (x - mean) / sqrt(var + eps) + bias), keeping y alone for backward.

    Use it where y is kept anyway, that is before a convolution. Parameters, buffers and state-dict keys are those of
    `nn.BatchNorm2d`, and so is the function, in training and in eval mode. It is not a `torch.nn.BatchNorm2d`, so that nothing
    takes it for one: `convert_sync_batchnorm` would drop the activation. What a compiled model keeps is up to the compiler.
    Among layers with an inverse (`LayerChain`) it is stored.

    Shapes: x: (B, C, H, W); returns the same.
    Args:
        channels: C.
        slope: of the negative side, > 0: ReLU cannot be undone.
        eps: added to the variance.
        momentum: weight of the batch in the running statistics; None averages over all batches.
        affine: whether there are weight and bias.
        track_running_stats: whether there are running statistics. Without them eval mode takes the batch's.
    Raises:
        InputError: a slope <= 0, one value per channel; in backward, create_graph=True.
    Source: Rota Bulo et al. 2018, "In-Place Activated BatchNorm", figure 2d.
    """

    def __init__(
        self,
        channels: int,
        slope: float = 0.01,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
    ):
        if not slope > 0:
            raise InputError(
                f"A leaky ReLU with a slope <= 0 cannot be undone. Received: {slope}. Use 0.01, or nn.BatchNorm2d and the "
                "activation as two layers."
            )
        super().__init__(channels, eps, momentum, affine, track_running_stats)
        self.slope = slope

    def forward(self, x: Tensor) -> Tensor:
        if can_keep_output(self, x):
            return InPlaceABNFunction.apply(x, self.weight, self.bias, self.slope, self)
        statistics, momentum = begin_batch(self)
        z = F.batch_norm(x, *statistics, self.weight, self.bias, uses_batch(self), momentum, self.eps)
        return F.leaky_relu(z, self.slope)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, slope={self.slope:g}"
