"""One tensor for two streams."""

from typing import Literal

from torch import Tensor

Join = Literal["mean", "last"]


def join_streams(x1: Tensor, x2: Tensor, how: Join) -> Tensor:
    """Return the mean of the streams, or x2, the newer one, alone.

    With `momentum` and `dual_residual`, a converted network starts as the original: x2 is the original's activation, x1 an
    earlier one.
    """
    return x2 if how == "last" else (x1 + x2) / 2
