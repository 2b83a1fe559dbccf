"""Functions of single elements that can be undone: what an in-place ABN computes after BatchNorm."""

from dataclasses import dataclass
from math import sqrt
from typing import Literal, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from revzoo.errors import InputError


@dataclass(frozen=True)
class Activation:
    """A function of single elements that can be undone.

    Args:
        name: leaky_relu, elu or identity.
        slope: of leaky ReLU's negative side; for ELU its alpha; both > 0.
    Raises:
        InputError: a slope <= 0, which cannot be undone.
    """

    name: Literal["leaky_relu", "elu", "identity"]
    slope: float = 1.0

    def __post_init__(self) -> None:
        if self.name not in ("leaky_relu", "elu", "identity"):
            raise InputError(f"The activation is leaky_relu, elu or identity. Received: {self.name!r}.")
        if not self.slope > 0:
            raise InputError(
                f"An activation with a slope <= 0 cannot be undone. Received: {self.name} with {self.slope}. Use 0.01, or "
                "nn.BatchNorm2d and the activation as two layers."
            )

    def __call__(self, z: Tensor, inplace: bool = False) -> Tensor:
        """Return act(z)."""
        if self.name == "leaky_relu":
            return F.leaky_relu(z, self.slope, inplace)
        return F.elu(z, self.slope, inplace) if self.name == "elu" else z

    def undo(self, y: Tensor) -> Tensor:
        """Return z in new memory."""
        if self.name == "leaky_relu":
            return F.leaky_relu(y, 1 / self.slope)
        if self.name == "elu":
            negative = (y / self.slope).clamp_(torch.finfo(y.dtype).eps - 1, 0).log1p_()
            return negative.add_(y.clamp(min=0))
        return y.clone()

    def differentiate(self, gradient: Tensor, y: Tensor) -> Tensor:
        """Return the gradient of z in new memory; of identity, the gradient itself."""
        if self.name == "leaky_relu":
            return cast(Tensor, torch.ops.aten.leaky_relu_backward(gradient, y, self.slope, True))
        if self.name == "elu":
            return cast(Tensor, torch.ops.aten.elu_backward(gradient, self.slope, 1, 1, True, y))
        return gradient

    def find_ratio(self, z: Tensor) -> Tensor | None:
        """Return a ratio for each channel: below 1, some z lose half of their digits in y. None if they never do."""
        if self.name != "elu":
            return None
        return z.amin((0, *range(2, z.dim()))).exp() * (2 / sqrt(torch.finfo(z.dtype).eps))
