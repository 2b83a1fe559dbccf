"""Learned embeddings of the positions of tokens."""

import torch
from torch import nn

from revzoo.parts.context import Shape


def build_position_embedding(tokens: Shape, std: float) -> nn.Parameter:
    """Return one embedding for each token, (1, N, D), drawn from a normal distribution truncated at +-2."""
    embedding = nn.Parameter(torch.empty(1, *tokens.dims))
    nn.init.trunc_normal_(embedding, std=std)
    return embedding
