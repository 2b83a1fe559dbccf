"""The stem for text: from ids to embedded tokens. Module names are those of Transformers.

B examples, N tokens, D channels.
"""

from typing import Literal, cast

import torch
from torch import Tensor, nn

from revzoo.bounds import NonNegativeInt, PositiveFloat, PositiveInt, Rate
from revzoo.errors import PartArgumentError
from revzoo.parts.context import BuildContext, Shape
from revzoo.registry import stems

PositionKind = Literal["learned", "after_padding", "sinusoidal", "none"]


@stems.register("token_embed")
class TokenStem(nn.Module):
    """Embed ids, add the embeddings of their positions and of token type 0, normalise and apply dropout.

    Shapes: ids (B, N) -> (B, N, D), N up to the input's length.
    Args:
        width: channels of a token, D.
        position: what is added for a token's position. `learned`: one embedding for each of 0 to N - 1; padding before a
            text shifts its positions. `after_padding`: positions count only the tokens that are not padding, starting at
            padding + 1, and padding gets a row of zeros. `sinusoidal`: sines and cosines, without parameters; padding before
            a text shifts them too. `none`: nothing.
        types: number of token types; every token has the first. 0 means no table of types.
        norm: `layer_norm` of the sum, or `none`.
        eps: eps of the LayerNorm.
        dropout: probability of dropping a channel of a token, in [0, 1).
        embedding_width: channels of the tables, the norm and dropout, E, if a linear layer makes them D; None: D itself.
    Source: Transformers' BertEmbeddings (`learned`), RobertaEmbeddings (`after_padding`) and ElectraModel
        (`embedding_width`); Vaswani et al. (2017),
        section 3.5 (`sinusoidal`).
    """

    def __init__(
        self,
        context: BuildContext,
        *,
        width: PositiveInt,
        position: PositionKind = "learned",
        types: NonNegativeInt = 0,
        norm: Literal["layer_norm", "none"] = "layer_norm",
        eps: PositiveFloat = 1e-5,
        dropout: Rate = 0.0,
        embedding_width: PositiveInt | None = None,
    ):
        super().__init__()
        vocabulary, padding = context.shape.width, context.padding
        context.require_kind("text", "token_embed")
        if padding is not None and padding >= vocabulary:
            raise PartArgumentError("type", "token_embed", f"an input.padding below {vocabulary}, the vocabulary")
        if position == "after_padding" and padding is None:
            raise PartArgumentError("position", position, "learned, sinusoidal or none, or an input with a padding id")
        embedded = width if embedding_width is None else embedding_width
        if position == "sinusoidal" and embedded % 2:
            argument = "width" if embedding_width is None else "embedding_width"
            raise PartArgumentError(argument, embedded, "an even number, half of it for sines and half for cosines")
        (length,) = context.shape.size
        self.out_shape = Shape(width, (length,), "tokens")
        self._position, self._padding = position, padding
        self.word_embeddings = nn.Embedding(vocabulary, embedded, padding_idx=padding)
        self.position_embeddings: nn.Embedding | None = None
        if position == "learned":
            self.position_embeddings = nn.Embedding(length, embedded)
        if position == "after_padding" and padding is not None:
            self.position_embeddings = nn.Embedding(length + padding + 1, embedded, padding_idx=padding)
        self.token_type_embeddings = nn.Embedding(types, embedded) if types else None
        self.LayerNorm = nn.LayerNorm(embedded, eps=eps) if norm == "layer_norm" else nn.Identity()
        self.dropout = nn.Dropout(dropout)
        self.embeddings_project = None if embedding_width is None else nn.Linear(embedded, width)

    @property
    def embedding(self) -> nn.Parameter:
        """The embedding table (vocabulary, D or E), which a head may share."""
        return cast(nn.Parameter, self.word_embeddings.weight)

    def forward(self, ids: Tensor, start: int = 0) -> Tensor:
        x: Tensor = self.word_embeddings(ids)
        if self.token_type_embeddings is not None:
            x = x + self.token_type_embeddings(ids.new_zeros(1))
        if self.position_embeddings is not None:
            x = x + self.position_embeddings(self._count_positions(ids) + start)
        elif self._position == "sinusoidal":
            x = x + _compute_sinusoids(ids.shape[1], x)
        dropped: Tensor = self.dropout(self.LayerNorm(x))
        return dropped if self.embeddings_project is None else self.embeddings_project(dropped)

    def _count_positions(self, ids: Tensor) -> Tensor:
        if self._position == "learned" or self._padding is None:
            return torch.arange(ids.shape[1], device=ids.device)
        present = (ids != self._padding).long()
        return present.cumsum(1) * present + self._padding


def _compute_sinusoids(length: int, like: Tensor) -> Tensor:
    """Return (N, D): at position n, channels 2i and 2i + 1 are sine and cosine of n / 10000^(2i / D)."""
    width = like.shape[-1]
    rates = 10000.0 ** -(torch.arange(0, width, 2, device=like.device, dtype=torch.float32) / width)
    angles = torch.arange(length, device=like.device)[:, None] * rates  # (N, D / 2)
    return torch.stack((angles.sin(), angles.cos()), -1).flatten(1).to(like.dtype)
