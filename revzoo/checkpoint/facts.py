"""What a file of weights says about the examples that its model takes: names of the classes, preprocessing, tokenizer.

The facts are attributes of the model, `class_names` and `data_config`, and metadata of the safetensors file. A tokenizer is a
file next to the weights.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, cast

from torch import nn

from revzoo.bounds import Bound
from revzoo.errors import CheckpointError
from revzoo.spec.names import BYTES, TOKENIZER
from revzoo.spec.parsing import parse_json_as

IMAGE_FACTS = ("mean", "std", "interpolation", "crop_pct", "crop_mode")  # how images are prepared, in timm's words
CLASSES, DATA_CONFIG = "revzoo.classes", "revzoo.data_config"  # keys of the metadata
_MAPPING = Annotated[Any, Bound("a mapping", lambda value: isinstance(value, dict))]


def collect_facts(model: nn.Module) -> dict[str, str]:
    """Return the facts of a model as metadata; what it does not say is left out."""
    names, config = getattr(model, "class_names", None), dict(getattr(model, "data_config", {}))
    if names is None and not config:
        return {}
    texts = {} if names is None else {CLASSES: json.dumps(list(names), ensure_ascii=False)}
    return texts | ({DATA_CONFIG: json.dumps(config)} if config else {})


def restore_facts(model: nn.Module, metadata: Mapping[str, str], file: Path, *, has_new_head: bool) -> None:
    """Give a model the facts that the metadata of a file holds.

    Args:
        model: the model, which has its weights.
        metadata: of the file.
        file: the file of weights.
        has_new_head: whether the head is not the file's, so that its classes are others.
    """
    if CLASSES in metadata and not has_new_head:
        cast(Any, model).class_names = read_fact(metadata[CLASSES], tuple[str, ...], file)
    if config := read_data_config(metadata, file):
        cast(Any, model).data_config = config


def read_data_config(metadata: Mapping[str, str], file: Path) -> dict[str, Any]:
    """Return the preprocessing in the metadata of a file, and the tokenizer's file; empty where nothing says it.

    A tokenizer next to the file goes before the one that the metadata name, which may be on another machine.
    """
    config: dict[str, Any] = read_fact(metadata.get(DATA_CONFIG, "{}"), _MAPPING, file)
    if (tokenizer := file.parent / TOKENIZER).is_file() and config.get("tokenizer") != BYTES:
        config["tokenizer"] = str(tokenizer.absolute())
    return {key: tuple(value) if isinstance(value, list) else value for key, value in config.items()}


def read_fact(text: str, annotation: Any, file: Path) -> Any:
    """Return a fact in the metadata of a file; raise CheckpointError if it is not what an annotation says."""
    try:
        return parse_json_as(annotation, text)
    except ValueError as error:
        reason = f"The metadata of {file} are damaged ({error}): {text[:80]!r}"
        raise CheckpointError(f"{reason}. Copy or save the file again.") from error
