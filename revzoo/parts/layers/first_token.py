"""The first token of each text of a padded batch."""

from torch import Tensor


def select_first_token(x: Tensor, mask: Tensor | None) -> Tensor:
    """Return (B, D) from x (B, N, D): each text's first token, skipping padding before it.

    Args:
        mask: (B, N), False at padding; None means that there is none.
    """
    if mask is not None:
        x = x.take_along_dim(mask.int().argmax(1)[:, None, None], 1)  # argmax returns the first True
    return x[:, 0]
