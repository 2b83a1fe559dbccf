"""The first token of each text of a padded batch."""

from torch import Tensor


def select_first_token(x: Tensor, mask: Tensor | None) -> Tensor:
    """Return (B, D) from x (B, N, D): each text's first token, skipping padding before it.

    Args:
        mask: (B, N), False at padding; None means that there is none.
    """
    if mask is not None:
        first = mask.int().argmax(1)  # which returns the first True
        x = x.gather(1, first[:, None, None].expand(-1, 1, x.shape[2]))  # take_along_dim would fix the batch in an export
    return x[:, 0]
