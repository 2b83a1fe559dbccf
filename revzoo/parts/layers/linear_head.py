"""The base of heads that end with a linear layer."""

from typing import cast

from torch import Tensor, nn


class LinearHead(nn.Module):
    """A head whose last layer is linear, can be replaced, and decides the number of outputs. A subclass computes its input.

    Args:
        last: name of the attribute that holds the last layer, an Identity where there are no classes.
        width: number of features that the last layer takes.
        bias: whether the last layer has one.
    """

    def __init__(self, last: str, width: int, bias: bool = True):
        super().__init__()
        self._last, self._bias = last, bias
        self.hidden_size = width

    @property
    def classifier(self) -> nn.Module:
        """The last layer."""
        return cast(nn.Module, getattr(self, self._last))

    @property
    def num_classes(self) -> int:
        """Number of classes; 0 if the head returns the features that the last layer would take."""
        return self.classifier.out_features if isinstance(self.classifier, nn.Linear) else 0

    @property
    def outputs(self) -> int:
        """Size of the last dimension of what the head returns."""
        return self.num_classes or self.hidden_size

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.classifier(self.compute_pre_logits(x, mask))

    def compute_pre_logits(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the features that the last layer takes."""
        raise NotImplementedError

    def reset(self, outputs: int, like: Tensor | None = None) -> None:
        """Replace the last layer by a fresh one with another number of outputs; 0 leaves the features as they are.

        Args:
            outputs: the number.
            like: a tensor of the device and dtype of the new layer; None: those of the old layer, else PyTorch's default ones.
        """
        old = getattr(self, self._last, None)
        like = old.weight if like is None and isinstance(old, nn.Linear) else like
        device, dtype = (None, None) if like is None else (like.device, like.dtype)
        fresh = nn.Linear(self.hidden_size, outputs, self._bias, device=device, dtype=dtype) if outputs else nn.Identity()
        setattr(self, self._last, fresh)
