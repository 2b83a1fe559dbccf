"""What data ask of a model: so many outputs, for a text or for each token, and of some that it sees no later token."""

import torch

from revzoo.data.base import Data
from revzoo.errors import DataError
from revzoo.model.builder import build
from revzoo.registry import branches
from revzoo.spec.schema import ImageInput, Spec

_POINTWISE = ("chunked_mlp", "feed_forward", "mlp")  # branches that transform each token by itself


def needed_outputs(spec: Spec, data: Data, name: str) -> int:
    """Return how many outputs a model needs for the data: classes, or for a language model its vocabulary.

    Args:
        name: of the data.

    Raises:
        DataError: a classifier for a language model's data or the other way round, or one that sees the next characters.
    """
    if isinstance(spec.input, ImageInput):
        return data.classes or 0
    with torch.device("meta"):
        model = build(spec).eval()
        per_token = model(model.example_input(1)).dim() == 3
    if per_token == (data.classes is not None):
        wanted, head = ("a class for a text", "sequence_classification") if per_token else ("an id for each token", "masked_lm")
        raise DataError(
            f"data.name={name} asks for {wanted}. Received: {spec.name} with the head {spec.head.type}. Use another model, or "
            f"another head: model.overrides=['head={{type: {head}}}']."
        )
    if name == "characters" and not _is_causal(spec):
        raise DataError(
            f"data.name=characters asks for the next character. Received: {spec.name}, which sees it. Use a model with causal "
            "attention such as model.name=reformer_mini, or data.name=masked_lm."
        )
    return data.classes or spec.input.vocabulary


def _is_causal(spec: Spec) -> bool:
    """Return whether every branch is pointwise or says that it is causal."""
    parts = [part for stage in spec.stages for part in (stage.f, stage.g) if part is not None]
    mixing = [(part, branches.arguments(part.type).get("causal")) for part in parts if part.type not in _POINTWISE]
    return all(known is not None and part.arguments.get("causal", known.default) for part, known in mixing)
