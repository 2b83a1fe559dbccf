"""Stems of texts: from ids to embedded tokens. Module names are those of Transformers.

B examples, N tokens, D channels.
"""

from typing import Annotated, Literal, cast

import torch
from torch import Tensor, nn

from revzoo.bounds import Bound, PositiveFloat, PositiveInt, Rate
from revzoo.errors import PartArgumentError
from revzoo.parts.context import BuildContext, Shape
from revzoo.registry import stems

Position = Literal["learned", "after_padding", "sinusoidal", "none"]
Count = Annotated[int, Bound("an integer >= 0", lambda n: n >= 0)]


@stems.register("token_embed")
class TokenStem(nn.Module):
    """Embed ids, add the embeddings of their positions and of token type 0, normalise and drop.

    Shapes: ids (B, N) -> (B, N, D), N up to the input's length.
    Args:
        width: channels of a token, D.
        position: `learned` has one embedding for each of 0 to N - 1, and padding in front shifts a text; `after_padding` counts
            the tokens that are not padding, from padding + 1, and gives padding a row of zeros; `sinusoidal` has no
            parameters, and shifts as `learned` does; `none` adds nothing.
        types: number of token types, of which all tokens have the first; 0 is no such table.
        norm: `layer_norm` over the sum, or `none`.
        eps: of the LayerNorm.
        dropout: probability of dropping a channel of a token, in [0, 1).
    Source: Transformers' BertEmbeddings (`learned`) and RobertaEmbeddings (`after_padding`); Vaswani et al. (2017),
        section 3.5 (`sinusoidal`).
    """

    def __init__(
        self,
        at: BuildContext,
        *,
        width: PositiveInt,
        position: Position = "learned",
        types: Count = 0,
        norm: Literal["layer_norm", "none"] = "layer_norm",
        eps: PositiveFloat = 1e-5,
        dropout: Rate = 0.0,
    ):
        super().__init__()
        at.require("text", "token_embed", "a stem for images, for example patch_embed, or input.kind: text")
        if at.padding is not None and at.padding >= at.shape.width:
            raise PartArgumentError("type", "token_embed", f"an input.padding below {at.shape.width}, the vocabulary")
        if position == "after_padding" and at.padding is None:
            raise PartArgumentError("position", position, "learned, sinusoidal or none, or an input with a padding id")
        if position == "sinusoidal" and width % 2:
            raise PartArgumentError("width", width, "an even number, half of it for sines and half for cosines")
        (length,) = at.shape.size
        self.out_shape = Shape(width, (length,), "tokens")
        self._position, self._padding = position, at.padding
        self.word_embeddings = nn.Embedding(at.shape.width, width, padding_idx=at.padding)
        self.position_embeddings: nn.Embedding | None = None
        if position == "learned":
            self.position_embeddings = nn.Embedding(length, width)
        if position == "after_padding" and at.padding is not None:
            self.position_embeddings = nn.Embedding(length + at.padding + 1, width, padding_idx=at.padding)
        self.token_type_embeddings = nn.Embedding(types, width) if types else None
        self.LayerNorm = nn.LayerNorm(width, eps=eps) if norm == "layer_norm" else nn.Identity()
        self.dropout = nn.Dropout(dropout)

    @property
    def embedding(self) -> nn.Parameter:
        """The table of embeddings, (vocabulary, D), which a head may share."""
        return cast(nn.Parameter, self.word_embeddings.weight)

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.word_embeddings(ids)
        if self.token_type_embeddings is not None:
            x = x + self.token_type_embeddings(ids.new_zeros(1))
        if self.position_embeddings is not None:
            x = x + self.position_embeddings(self._positions(ids))
        elif self._position == "sinusoidal":
            x = x + _waves(ids.shape[1], x)
        dropped: Tensor = self.dropout(self.LayerNorm(x))
        return dropped

    def _positions(self, ids: Tensor) -> Tensor:
        if self._position == "learned" or self._padding is None:
            return torch.arange(ids.shape[1], device=ids.device)
        present = (ids != self._padding).long()
        return present.cumsum(1) * present + self._padding


def _waves(length: int, like: Tensor) -> Tensor:
    """Return (N, D): at position n, channels 2i and 2i + 1 are sine and cosine of n / 10000^(2i / D)."""
    width = like.shape[-1]
    rates = 10000.0 ** -(torch.arange(0, width, 2, device=like.device, dtype=torch.float32) / width)
    angles = torch.arange(length, device=like.device)[:, None] * rates  # (N, D / 2)
    return torch.stack((angles.sin(), angles.cos()), -1).flatten(1).to(like.dtype)
