"""How examples are prepared where training starts from weights: images and texts as the weights' own were."""

import filecmp
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from revzoo.checkpoint.facts import IMAGE_FACTS, read_data_config
from revzoo.checkpoint.files import read_metadata
from revzoo.data.options import UNROTATED, check_augment, is_own
from revzoo.spec.schema import ImageInput, Spec
from revzoo.training.make_network import find_starting_weights
from revzoo.training.options import Recipe

_PER_CHANNEL = ("mean", "std")


def adopt_preprocessing(recipe: Recipe, spec: Spec, config: Mapping[str, Any] | None = None) -> tuple[Recipe, list[str]]:
    """Return a recipe with the preprocessing that belongs to its starting weights, and lines that say so, or none.

    What the recipe sets stays. Digits and characters are prepared in one way only, data of the user's own by the user.

    Args:
        recipe: the recipe.
        spec: of the model that is trained.
        config: the preprocessing; None: what the file of the weights says.

    Raises:
        CheckpointError: the file's preprocessing is damaged.
    """
    if recipe.data.name == "digits" or is_own(recipe.data.name):
        return recipe, []
    config = _read_preprocessing(recipe) if config is None else config
    return _adopt_images(recipe, spec.input, config) if isinstance(spec.input, ImageInput) else _adopt_tokenizer(recipe, config)


def _adopt_images(recipe: Recipe, input: ImageInput, config: Mapping[str, Any]) -> tuple[Recipe, list[str]]:
    """Adopt how images are normalised, resized and cropped; what a file says of other channels is left out."""
    augment = recipe.data.augment
    facts = {name: config[name] for name in IMAGE_FACTS if name in config and getattr(augment, name) is None}
    unusable = [name for name, value in facts.items() if check_augment(name, value)]
    if augment.auto_augment is not None and facts.get("interpolation") in UNROTATED:
        unusable.append("interpolation")
    notes = [f"data.augment.{name} takes no {facts.pop(name)!r}, as the weights have it" for name in unusable]
    known = {name: value for name, value in facts.items() if name not in _PER_CHANNEL or len(value) == input.channels}
    if not known:
        return recipe, notes
    words = ", ".join(f"{name}={_write(value)}" for name, value in known.items())
    note = f"images are prepared as the weights need them: {words} (data.augment sets others)"
    return replace(recipe, data=replace(recipe.data, augment=replace(augment, **known))), [note, *notes]


def _adopt_tokenizer(recipe: Recipe, config: Mapping[str, Any]) -> tuple[Recipe, list[str]]:
    """Adopt the tokenizer, or say that the recipe has another one."""
    known, text = config.get("tokenizer"), recipe.data.text
    if known is None or known == text.tokenizer:
        return recipe, []
    if text.tokenizer is None:
        note = f"the tokenizer is that of the weights, {known} (data.text.tokenizer sets another)"
        return replace(recipe, data=replace(recipe.data, text=replace(text, tokenizer=known))), [note]
    if _have_same_content(known, text.tokenizer):
        return recipe, []
    return recipe, [f"the weights have another tokenizer, {known}: what they learnt of its ids is lost"]


def _have_same_content(name: str, other: str) -> bool:
    """Return whether both names are files, with equal contents."""
    files = Path(name), Path(other)
    return all(map(Path.is_file, files)) and filecmp.cmp(*files, shallow=False)


def _read_preprocessing(recipe: Recipe) -> dict[str, Any]:
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
