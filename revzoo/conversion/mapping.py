"""Which tensors of the original become which tensors of the converted network, in both directions.

Throughout `revzoo.conversion`, "ours" are the keys and tensors of the converted network, "theirs" those of the original.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Transform = Literal["copied", "renamed", "tied", "merged", "reshaped", "transposed", "shortened", "unused"]


@dataclass(frozen=True)
class TensorMapping:
    """Some tensors of the original, and the tensors of the converted network with the same values.

    Args:
        ours: keys in the converted network's state dict; none where the tensors have no place in it and are only given back.
        theirs: keys in the original's state dict.
        transform: what is done with them. "tied" tensors are copies, of which ours is one; "merged" ones are
            stacked along their first dimension (q, k and v of an attention); "transposed" ones are TensorFlow's weights,
            whose inputs and outputs are the last dimensions; of a "shortened" one ours lacks the first row
            of (1, N, D), which was all ones; "unused" ones may be missing.
        shape: of ours, where that is another one ("reshaped").
        original_shapes: of theirs, for "reshaped" ones, and "merged" ones where these differ.
    """

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    transform: Transform
    shape: tuple[int, ...] = ()
    original_shapes: tuple[tuple[int, ...], ...] = ()

    def to_ours(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Compute the tensors at `ours` from those at `theirs`, both in the order of the keys."""
        match self.transform:
            case "tied":
                return tensors[:1]
            case "merged":
                return [torch.cat(list(tensors))]
            case "reshaped":
                return [tensors[0].reshape(self.shape)]
            case "transposed":
                return [tensors[0].permute((3, 2, 0, 1) if tensors[0].dim() == 4 else (1, 0))]
            case "shortened":
                return [tensors[0][:, 1:]]
            case "unused":
                return []
        return tensors

    def to_theirs(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Compute the tensors at `theirs` from those at `ours`."""
        match self.transform:
            case "tied":
                return [tensors[0]] * len(self.theirs)
            case "merged":
                rows = [shape[0] for shape in self.original_shapes] or [len(tensors[0]) // len(self.theirs)] * len(self.theirs)
                return torch.split(tensors[0], rows)
            case "reshaped":
                return [tensors[0].reshape(self.original_shapes[0])]
            case "transposed":
                return [tensors[0].permute((2, 3, 1, 0) if tensors[0].dim() == 4 else (1, 0))]
            case "shortened":
                return [F.pad(tensors[0], (0, 0, 1, 0), value=1.0)]
        return tensors


def rename(ours: str, theirs: str) -> TensorMapping:
    """Return the mapping of a tensor whose values stay as they are; its key may stay, too."""
    return TensorMapping((ours,), (theirs,), "copied" if ours == theirs else "renamed")


def rename_module(ours: str, theirs: str) -> Iterator[TensorMapping]:
    """Yield the mappings of a module's weight and bias."""
    for name in ("weight", "bias"):
        yield rename(f"{ours}.{name}", f"{theirs}.{name}")
