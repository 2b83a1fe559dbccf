"""Which tensors of the original become which tensors of the converted network, in both directions.

Throughout `revzoo.conversion`, "ours" are the keys and tensors of the converted network, "theirs" those of the original.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Transform = Literal["copied", "renamed", "tied", "merged", "reshaped", "unused"]
TensorFunction = Callable[[Sequence[Tensor]], Sequence[Tensor]]


def _keep(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    return tensors


@dataclass(frozen=True)
class TensorMapping:
    """Some tensors of the original, the tensors of the converted network with the same values, and the functions between them.

    Args:
        ours: keys in the converted network's state dict; none where the tensors have no place in it and are only given back.
        theirs: keys in the original's state dict.
        transform: name of the change, for the report.
        to_ours: computes the tensors at `ours` from those at `theirs`, both in the order of the keys.
        to_theirs: the inverse of `to_ours`.
    """

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    transform: Transform
    to_ours: TensorFunction = _keep
    to_theirs: TensorFunction = _keep


def rename(ours: str, theirs: str) -> TensorMapping:
    """Return the mapping of a tensor whose values stay as they are; its key may stay, too."""
    return TensorMapping((ours,), (theirs,), "copied" if ours == theirs else "renamed")


def rename_module(ours: str, theirs: str, names: Sequence[str] = ("weight", "bias")) -> Iterator[TensorMapping]:
    """Yield the mappings of a module's parameters, which have the same names in both networks."""
    for name in names:
        yield rename(f"{ours}.{name}", f"{theirs}.{name}")


def tie(ours: str, theirs: Sequence[str]) -> TensorMapping:
    """Return the mapping of a tensor that the original has under several keys."""
    return TensorMapping(
        (ours,), tuple(theirs), "tied", lambda tensors: tensors[:1], lambda tensors: [tensors[0]] * len(theirs)
    )


def set_aside(theirs: str) -> TensorMapping:
    """Return the mapping of a parameter of the original that the converted network has no place for; it may be missing."""
    return TensorMapping((), (theirs,), "unused", lambda _: [], lambda _: [])


def merge(ours: str, theirs: Sequence[str]) -> TensorMapping:
    """Return the mapping that stacks tensors of equal shape along their first dimension (q, k and v of an attention)."""
    count = len(theirs)
    return TensorMapping(
        (ours,), tuple(theirs), "merged", lambda tensors: [torch.cat(list(tensors))], lambda tensors: tensors[0].chunk(count)
    )


def reshape(ours: str, theirs: str, shape: Sequence[int], original_shape: Sequence[int]) -> TensorMapping:
    """Return the mapping that changes the shape of a tensor and nothing else."""
    return TensorMapping(
        (ours,),
        (theirs,),
        "reshaped",
        lambda tensors: [tensors[0].reshape(tuple(shape))],
        lambda tensors: [tensors[0].reshape(tuple(original_shape))],
    )
