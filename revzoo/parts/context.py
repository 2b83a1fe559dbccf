"""What the builder hands to a part: the shape that arrives and the stage it is built for, with checks of its arguments."""

from dataclasses import dataclass
from math import prod
from typing import Literal

from torch import nn

from revzoo.bijection import SpaceToDepth
from revzoo.errors import PartArgumentError

TensorKind = Literal["image", "tokens", "text"]
_ALLOWED = {
    "image": "a stem that gives images, for example conv",
    "tokens": "a stem that gives tokens, for example patch_embed",
    "grid": "a stem that gives a 2-dimensional grid of tokens, such as patch_embed",
    "text": "a stem for images, for example patch_embed, or input.kind: text",
}
_IMAGE_STEM_ALLOWED = "an input of kind image, or token_embed for texts"


@dataclass(frozen=True)
class Shape:
    """The shape of one stream, or of one ordinary tensor, without its batch dimension.

    Shapes: `image` is (B, width, *size); `tokens` is (B, prod(size), width), where `size` is the grid of tokens; `text` is
        (B, N) ids with N up to size[0], from a vocabulary of `width` ids.
    """

    width: int
    size: tuple[int, ...]
    kind: TensorKind

    @property
    def dims(self) -> tuple[int, ...]:
        """The tensor's dimensions after the batch."""
        return {"image": (self.width, *self.size), "tokens": (prod(self.size), self.width), "text": self.size}[self.kind]

    @property
    def channel_dim(self) -> int:
        """The index of the channels among the dimensions of a batch of images or tokens."""
        return 1 if self.kind == "image" else 2


@dataclass(frozen=True)
class BuildContext:
    """What the builder knows when it builds one part.

    Args:
        shape: what the part receives: the input for a stem, one stream for a branch.
        width: channels per stream of the stage. A stem takes its width from its own arguments instead.
        index: number of the block within its stage, from 0.
        drop_path: probability of dropping the branch, in [0, 1).
        folded: for the first block of a stage that begins with `space_to_depth`, that transition; else None.
        padding: for the stem of a text, the id that marks padding, or None.
        embedding: for a head, the stem's embedding table (vocabulary, D), which the head may share, or None.
        streams: for a fuse, how many tensors arrive: two streams, or one tensor.
    """

    shape: Shape
    width: int
    index: int = 0
    drop_path: float = 0.0
    folded: SpaceToDepth | None = None
    padding: int | None = None
    embedding: nn.Parameter | None = None
    streams: int = 2

    @property
    def sides(self) -> tuple[int, int]:
        """Height and width of an image, or of a grid of tokens."""
        height, width = self.shape.size
        return height, width

    def require_kind(self, kind: TensorKind | Literal["grid"], part: str, allowed: str = "") -> None:
        """Raise PartArgumentError unless tensors of this kind arrive.

        Args:
            kind: what the part can work on; `grid` means tokens on a 2-dimensional grid.
            part: registered name of the part, for the message.
            allowed: what fits instead, for the message; empty for the usual advice.
        Raises:
            PartArgumentError: tensors of another kind arrive.
        """
        shape = self.shape
        if shape.kind == kind or (kind == "grid" and shape.kind == "tokens" and len(shape.size) == 2):
            return
        if kind == "image" and shape.kind == "text":  # only a stem receives the ids of a text
            allowed = allowed or _IMAGE_STEM_ALLOWED
        raise PartArgumentError("type", part, allowed or _ALLOWED[kind])

    def require_divisor(self, argument: str, number: int, width: int | None = None) -> None:
        """Raise PartArgumentError unless the argument's number divides `width` channels, by default the stage's."""
        width = self.width if width is None else width
        if width % number:
            raise PartArgumentError(argument, number, f"a divisor of the width {width}")

    def require_stride(self, argument: str, stride: int) -> None:
        """Raise PartArgumentError unless a stride divides both sides of the image, or of the grid of tokens, that arrives."""
        height, width = self.sides
        if height % stride or width % stride:
            surface = "image" if self.shape.kind == "image" else "grid"
            raise PartArgumentError(argument, stride, f"a divisor of both sides of the {height}x{width} {surface}")

    def require_hidden_channel(self, argument: str, ratio: float, width: int | None = None) -> None:
        """Raise PartArgumentError unless `ratio` times `width` channels, by default the stage's, is at least 1."""
        width = self.width if width is None else width
        if width * ratio < 1:
            raise PartArgumentError(argument, ratio, f"a ratio that leaves a hidden channel of the width {width}")
