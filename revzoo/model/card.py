"""The model card of a saved model: the README.md that the hub shows."""

import json

from revzoo.format import format_count, format_shape
from revzoo.spec.schema import ImageInput, Spec

CARD = "README.md"
_TASKS = {  # names of the hub, by head
    "masked_lm": "fill-mask",
    "pooled_linear": "image-classification",
    "sequence_classification": "text-classification",
    "text_features": "feature-extraction",
}
_CARD = """---
{header}
---

# {name}

A reversible network of revzoo: in training its activations are reconstructed in backward instead of stored.
It has {parameters} parameters and takes {input}.

```python
import revzoo

model = revzoo.create("{source}")
```

Where its numbers are from:

{sources}
"""


def write_card(spec: Spec, parameters: int, source: str) -> str:
    """Return the text of a model's card; licence, data and accuracy are the author's to add.

    Args:
        spec: the model's spec.
        parameters: how many it has.
        source: what `revzoo.create` takes to make it.
    """
    images = isinstance(spec.input, ImageInput)
    header = ["library_name: revzoo", f"tags: {json.dumps(['revzoo', 'reversible', spec.family])}"]
    if spec.head.type in _TASKS and (images or spec.head.type != "pooled_linear"):
        header.append(f"pipeline_tag: {_TASKS[spec.head.type]}")
    if isinstance(spec.input, ImageInput):
        takes = f"images, {format_shape((spec.input.channels, *spec.input.size))}"
    else:
        takes = f"texts of up to {spec.input.length} ids, of {spec.input.vocabulary}"
    return _CARD.format(
        header="\n".join(header),
        name=spec.name,
        parameters=format_count(parameters),
        input=takes,
        source=source,
        sources="\n".join(f"- {citation['of']}: {citation['cite']}" for citation in spec.sources) or "- its author",
    )
