"""The base of heads that end with a linear layer."""

from typing import cast

from torch import nn


class LinearHead(nn.Module):
    """A head whose last layer is linear, can be replaced, and decides the number of outputs.

    Args:
        last: name of the attribute that holds the last layer.
    """

    def __init__(self, last: str):
        super().__init__()
        self._last = last

    @property
    def outputs(self) -> int:
        """Size of the last dimension of what the head returns."""
        return cast(nn.Linear, getattr(self, self._last)).out_features

    def reset(self, outputs: int) -> None:
        """Replace the last layer by a fresh one with another number of outputs."""
        old = cast(nn.Linear, getattr(self, self._last))
        fresh = nn.Linear(old.in_features, outputs, old.bias is not None, device=old.weight.device, dtype=old.weight.dtype)
        setattr(self, self._last, fresh)
