"""How alike the outputs of a network have to be before and after it is made reversible."""

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from revzoo.runtime.coupling import RandomSign

LEAST_COSINE = 0.99  # below it, weights hardly carry over to the new function


def measure_cosines(before: Tensor, after: Tensor) -> Tensor:
    """Return the cosine of every two rows (..., C); 1 where they are equal, also of zeros, as a fresh head returns them."""
    return torch.cosine_similarity(before, after, dim=-1).masked_fill((before == after).all(-1), 1.0)


@contextmanager
def on_grid_of_training(chains: Iterable[Any]) -> Iterator[None]:
    """Have chains, or models, with random signs compute on their grid in evaluation, too, without these signs."""
    before = [(chain, chain.coupling) for chain in chains if isinstance(chain.coupling, RandomSign)]
    for chain, coupling in before:
        chain.coupling = coupling.on_grid
    try:
        yield
    finally:
        for chain, coupling in before:
            chain.coupling = coupling


def warn_of_another_function(network: str, cosine: float, remedy: str) -> None:
    """Warn if a network that was made reversible computes another function than before.

    Args:
        network: its name.
        cosine: of its outputs before and after, the mean over rows; NaN is warned of.
        remedy: sentences that say what keeps the function nearer.
    """
    if not cosine >= LEAST_COSINE:
        warnings.warn(
            f"{network} computes another function now: the cosine of its outputs before and after is {cosine:.3f}. {remedy}",
            stacklevel=3,
        )
