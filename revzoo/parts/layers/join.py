"""One tensor for two streams."""

from typing import Literal

from torch import Tensor

Join = Literal["mean", "last"]


def join_streams(x1: Tensor, x2: Tensor, how: Join) -> Tensor:
    """Return the mean of the streams, or x2, the newer one, alone.

    In a coupling that begins as an ordinary network, x2 is that network's only stream and x1 an earlier state of it.
    """
    return x2 if how == "last" else (x1 + x2) / 2
