"""How alike the outputs of a network have to be before and after it is made reversible."""

import warnings

import torch
from torch import Tensor

LEAST_COSINE = 0.99  # below it, weights hardly carry over to the new function


def measure_cosines(before: Tensor, after: Tensor) -> Tensor:
    """Return the cosine of each row of two outputs, 1 where they are equal: a head that begins with zeros returns zeros."""
    return torch.cosine_similarity(before, after, dim=-1).where((before != after).any(-1), 1.0)


def warn_of_another_function(network: str, cosine: float, remedy: str, stacklevel: int = 3) -> None:
    """Warn if a network that was made reversible computes another function than before.

    Args:
        network: its name.
        cosine: of its outputs before and after, the mean over rows; NaN is warned of.
        remedy: sentences that say what keeps the function nearer.
        stacklevel: as in `warnings.warn`, from here: 3 is the caller of the function that calls this one.
    """
    if not cosine >= LEAST_COSINE:
        warnings.warn(
            f"{network} computes another function now: the cosine of its outputs before and after is {cosine:.3f}. {remedy}",
            stacklevel=stacklevel,
        )
