"""Where a part is built: what reaches it and what is asked of it."""

from dataclasses import dataclass
from math import prod
from typing import Literal

Layout = Literal["image", "tokens"]


@dataclass(frozen=True)
class Shape:
    """One stream (or one ordinary tensor) without its batch dimension.

    Shapes: `image` is (B, width, *size); `tokens` is (B, prod(size), width), `size` being the token grid.
    """

    width: int
    size: tuple[int, ...]
    layout: Layout

    @property
    def dims(self) -> tuple[int, ...]:
        """The tensor's dimensions after the batch."""
        return (self.width, *self.size) if self.layout == "image" else (prod(self.size), self.width)


@dataclass(frozen=True)
class Site:
    """The place of one part in the walk over a spec.

    Args:
        shape: what arrives. For a stem the input image, for a branch one stream.
        width: channels per stream that the stage asks for (a stem sizes itself by its own arguments).
        index: number of the block within its stage, from 0.
        drop_path: probability of dropping the branch, in [0, 1).
    """

    shape: Shape
    width: int
    index: int = 0
    drop_path: float = 0.0
