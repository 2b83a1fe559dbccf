"""How images are normalised, resized and cropped where training starts from weights: as the weights' own images were."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from safetensors import SafetensorError

from revzoo.checkpoint.facts import read_data_config
from revzoo.checkpoint.files import read_metadata
from revzoo.spec.schema import ImageInput, Spec
from revzoo.training.network import find_starting_weights
from revzoo.training.options import Recipe

_PER_CHANNEL = ("mean", "std")
_OTHERS = ("interpolation", "crop_pct", "crop_mode")


def adopt_preprocessing(recipe: Recipe, spec: Spec) -> tuple[Recipe, list[str]]:
    """Return a recipe with the preprocessing that the file of its starting weights names, and a line that says so, or none.

    What the recipe sets stays. Digits are prepared in one way only, and what a file says of other channels is left out.

    Args:
        recipe: the recipe.
        spec: of the model that is trained.

    Raises:
        CheckpointError: the file's preprocessing is damaged.
    """
    if not isinstance(spec.input, ImageInput) or recipe.data.name == "digits":
        return recipe, []
    augment, config = recipe.data.augment, dict(_read_preprocessing(recipe))
    for name in _PER_CHANNEL:
        if len(config.get(name, ())) != spec.input.channels:
            config.pop(name, None)
    known = {name: config[name] for name in (*_PER_CHANNEL, *_OTHERS) if name in config and getattr(augment, name) is None}
    if not known:
        return recipe, []
    words = ", ".join(f"{name}={_write(value)}" for name, value in known.items())
    note = f"images are prepared as those of the starting weights: {words} (data.augment sets others)"
    return replace(recipe, data=replace(recipe.data, augment=replace(augment, **known))), [note]


def _read_preprocessing(recipe: Recipe) -> Mapping[str, Any]:
    """Return what the file of the starting weights says; nothing where there is none, or it is of another format."""
    file = find_starting_weights(recipe.model)
    if file is None:
        return {}
    try:
        metadata = read_metadata(file)
    except (SafetensorError, OSError):  # a file that is missing or damaged is reported when it is loaded
        return {}
    return read_data_config(metadata, file)


def _write(value: Any) -> str:
    return f"[{', '.join(f'{each:.4g}' for each in value)}]" if isinstance(value, tuple) else str(value)
