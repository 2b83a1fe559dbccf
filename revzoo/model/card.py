"""The model card of a saved model: the README.md that the hub shows."""

import json
from typing import Any, cast

from torch import nn

from revzoo.format import format_count, format_shape
from revzoo.spec.schema import ImageInput, Spec

CARD = "README.md"
_TASKS = {  # names of the hub, by head
    "masked_lm": "fill-mask",
    "pooled_linear": "image-classification",
    "sequence_classification": "text-classification",
    "text_features": "feature-extraction",
}


def write_card(spec: Spec, model: nn.Module, source: str) -> str:
    """Return the text of a model's card.

    Args:
        spec: the model's spec.
        model: the model; licence, data and accuracy are the author's to add.
        source: what `revzoo.create` takes to make it.
    """
    task, is_image = _TASKS.get(spec.head.type), isinstance(spec.input, ImageInput)
    if task in ("image-classification", "text-classification"):
        task = "image-classification" if is_image else "text-classification"
    if isinstance(spec.input, ImageInput):
        takes = f"images, {format_shape((spec.input.channels, *spec.input.size))}"
    else:
        takes = f"texts of up to {spec.input.length} ids, of {spec.input.vocabulary}"
    rows = {
        "input": takes,
        "outputs": str(cast(Any, model).num_outputs),
        "parameters": format_count(sum(p.numel() for p in model.parameters())),
        "reversible steps": str(len(cast(Any, model).steps)),
        "coupling": ", ".join([spec.coupling.type, *(f"{key}={value}" for key, value in spec.coupling.arguments.items())]),
    }
    header = ["library_name: revzoo", f"tags: {json.dumps(['revzoo', 'reversible', spec.family])}"]
    header += [f"pipeline_tag: {task}"] if task else []
    sources = [f"- {citation['of']}: {citation['cite']}" for citation in spec.sources]
    return "\n".join(
        [
            *("---", *header, "---", "", f"# {spec.name}", ""),
            "A reversible network of revzoo: in training its activations are reconstructed in backward instead of stored.",
            *("", "```python", "import revzoo", "", f'model = revzoo.create("{source}")', "```", ""),
            *("| | |", "|---|---|", *(f"| {key} | {value} |" for key, value in rows.items()), ""),
            *(["Where its numbers are from:", "", *sources, ""] if sources else []),
        ]
    )
