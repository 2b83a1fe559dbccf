"""Where a part is built: what reaches it and what is asked of it."""

from dataclasses import dataclass
from math import prod
from typing import Literal

from torch import Tensor, nn

from revzoo.bijection import SpaceToDepth
from revzoo.errors import PartArgumentError

Layout = Literal["image", "tokens", "text"]
_ALLOWED = {
    "image": "a stem that gives images, for example conv",
    "tokens": "a stem that gives tokens, for example patch_embed",
    "grid": "a stem that gives a 2-dimensional grid of tokens, such as patch_embed",
}


@dataclass(frozen=True)
class Shape:
    """One stream (or one ordinary tensor) without its batch dimension.

    Shapes: `image` is (B, width, *size); `tokens` is (B, prod(size), width), `size` being the token grid; `text` is (B, N)
        ids, N up to size[0], of a vocabulary of `width`.
    """

    width: int
    size: tuple[int, ...]
    layout: Layout

    @property
    def dims(self) -> tuple[int, ...]:
        """The tensor's dimensions after the batch."""
        return {"image": (self.width, *self.size), "tokens": (prod(self.size), self.width), "text": self.size}[self.layout]


def joined(x1: Tensor, x2: Tensor, how: Literal["mean", "last"]) -> Tensor:
    """Return one tensor for two streams: their mean, or the newer one alone, which an ordinary network's only stream is."""
    return x2 if how == "last" else (x1 + x2) / 2


@dataclass(frozen=True)
class BuildContext:
    """The place of one part in the walk over a spec.

    Args:
        shape: what arrives. For a stem the input, for a branch one stream.
        width: channels per stream that the stage asks for (a stem sizes itself by its own arguments).
        index: number of the block within its stage, from 0.
        drop_path: probability of dropping the branch, in [0, 1).
        folded: the space_to_depth in front of the stage, if there is one, for the stage's first block.
        padding: the id in a text that is not attended to, if there is one.
        embedding: a text stem's table of embeddings, (vocabulary, D), which a head may share.
    """

    shape: Shape
    width: int
    index: int = 0
    drop_path: float = 0.0
    folded: SpaceToDepth | None = None
    padding: int | None = None
    embedding: nn.Parameter | None = None

    @property
    def sides(self) -> tuple[int, int]:
        """Height and width of an image, or of a grid of tokens."""
        height, width = self.shape.size
        return height, width

    def require(self, layout: Layout | Literal["grid"], part: str, allowed: str = "") -> None:
        """Raise PartArgumentError, which names the part, unless this layout arrives; a grid is two-dimensional tokens."""
        found = self.shape.layout
        if layout == "grid" and found == "tokens" and len(self.shape.size) == 2:
            return
        if found != layout:
            raise PartArgumentError("type", part, allowed or _ALLOWED[layout])
