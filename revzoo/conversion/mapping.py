"""Which tensors of a source become which of ours, in both directions."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Change = Callable[[Sequence[Tensor]], Sequence[Tensor]]
How = Literal["copied", "renamed", "merged", "reshaped"]


def _same(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    return tensors


@dataclass(frozen=True)
class Entry:
    """Some tensors of the source, the same values among ours, and the way between them.

    Args:
        ours: keys in our state dict.
        theirs: keys in the source's.
        how: what happens to them, for the report.
        to_ours: from the tensors at `theirs` to those at `ours`, in order.
        to_theirs: back.
    """

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    how: How
    to_ours: Change = _same
    to_theirs: Change = _same


def renamed(ours: str, theirs: str) -> Entry:
    """Return an entry that changes the key alone, if that."""
    return Entry((ours,), (theirs,), "copied" if ours == theirs else "renamed")


def module(ours: str, theirs: str, names: Sequence[str] = ("weight", "bias")) -> Iterator[Entry]:
    """Yield the entries of a module whose parameters have the same names on both sides."""
    for name in names:
        yield renamed(f"{ours}.{name}", f"{theirs}.{name}")


def merged(ours: str, theirs: Sequence[str]) -> Entry:
    """Return an entry that stacks tensors of equal shape along their first dimension (q, k and v of an attention)."""
    count = len(theirs)
    return Entry(
        (ours,), tuple(theirs), "merged", lambda tensors: [torch.cat(list(tensors))], lambda tensors: tensors[0].chunk(count)
    )


def reshaped(ours: str, theirs: str, shape: Sequence[int], source_shape: Sequence[int]) -> Entry:
    """Return an entry that gives a tensor another shape and nothing else."""
    return Entry(
        (ours,),
        (theirs,),
        "reshaped",
        lambda tensors: [tensors[0].reshape(tuple(shape))],
        lambda tensors: [tensors[0].reshape(tuple(source_shape))],
    )
