"""Check that a model fits a data set: number of outputs, sequence or token head, causal attention."""

import torch

from revzoo.data.base import Data
from revzoo.errors import DataError
from revzoo.model.builder import build
from revzoo.registry import branches
from revzoo.spec.schema import ImageInput, Spec


def count_required_outputs(spec: Spec, data: Data, name: str) -> int:
    """Return how many outputs a model needs for a data set: the number of classes, or a language model's vocabulary.

    Args:
        spec: the model's spec.
        data: the loaded data set.
        name: `data.name` of the recipe, for messages.

    Raises:
        DataError: a classifier for a language model's data or the reverse, a head that predicts nothing, or next-token
            prediction with a model that sees later tokens.
    """
    if isinstance(spec.input, ImageInput):
        return data.num_classes or 0
    with torch.device("meta"), torch.no_grad():  # no step needs an inverse
        model = build(spec).eval()
        per_token = model(model.example_input(1)).dim() == 3
    has_classes = data.num_classes is not None
    returns_features = spec.head.type == "text_features"
    if per_token == has_classes or returns_features:
        needed, head = ("one class for a text", "sequence_classification") if has_classes else ("an id per token", "masked_lm")
        features = f", which returns {model.num_outputs} features and predicts nothing" if returns_features else ""
        raise DataError(
            f"data.name={name} needs a model that predicts {needed}. Received: {spec.name} with the head {spec.head.type}"
            f"{features}. Use another model, or another head: model.overrides=['head={{type: {head}}}']."
        )
    if name == "causal_lm" and not _is_causal(spec):
        raise DataError(
            f"data.name=causal_lm is next-token prediction. Received: {spec.name}, whose attention is not causal: it sees the "
            "token that it should predict. Use a model with causal attention such as model.name=rev_gpt_mini, or "
            "data.name=masked_lm."
        )
    return data.num_classes or spec.input.vocabulary


def _is_causal(spec: Spec) -> bool:
    """Return whether every branch is causal, since it takes what was read before, or has its argument `causal` set."""
    parts = [part for stage in spec.stages for part in (stage.f, stage.g) if part is not None]
    mixing = [part for part in parts if not getattr(branches[part.type], "takes_past", False)]
    parameters = [(part, branches.arguments(part.type).get("causal")) for part in mixing]
    return all(parameter is not None and part.arguments.get("causal", parameter.default) for part, parameter in parameters)
