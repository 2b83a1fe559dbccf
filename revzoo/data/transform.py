"""From an image or a text to what a model takes, as its evaluation does it."""

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from timm.data import create_transform
from torch import Tensor

from revzoo.checkpoint.facts import IMAGE_FACTS
from revzoo.data.options import check_augment
from revzoo.data.stored_images import convert_image, explain_broken, read_image
from revzoo.data.tokenizer import Tokenizer, open_tokenizer
from revzoo.errors import InputError
from revzoo.model.model import Model
from revzoo.spec.schema import TextInput

_logger = logging.getLogger("revzoo")


def transform(model: Model) -> Callable[[Any], Tensor]:
    """Return the function that makes an input of a model from an image or a text, as evaluation does.

    `model.data_config` says how; training sets it, and it is saved with the weights. Without it images are resized, cropped and
    normalised as timm does by default, and a warning says so. The function takes an image's file or an open image of Pillow,
    and returns (C, H, W); or it takes a text, and returns its ids (N,), cut at the model's length.

    Args:
        model: the model.

    Raises:
        InputError: it is no model of revzoo, nothing says which tokenizer a model for texts has, or the model takes other
            channels than images have.
        DataError: the tokenizer is missing or does not fit the model; from the function: an image that cannot be read.
    """
    if not isinstance(model, Model):
        raise InputError(f"transform takes a model of revzoo.create. Received: {type(model).__name__}.")
    return _tokenize_with(model, model.spec.input) if isinstance(model.spec.input, TextInput) else _transform_images(model)


def _transform_images(model: Model) -> Callable[[Any], Tensor]:
    if "mean" not in model.data_config:
        _logger.warning(
            "Nothing says how images of %s are prepared: they are normalised by ImageNet's mean and standard deviation. Set "
            "model.data_config, or that of your own data set.",
            model.spec.name,
        )
    config = model.pretrained_cfg
    channels, *size = config["input_size"]
    modes = {1: "L", 3: "RGB"}
    if channels not in modes:
        raise InputError(f"Images have 1 or 3 channels. Received: {model.spec.name}, which takes {channels}.")
    chosen = {key: config[key] for key in IMAGE_FACTS}
    for key, value in chosen.items():
        allowed = check_augment(key, value)
        if allowed or (isinstance(value, tuple) and len(value) != channels):
            allowed = allowed or f"a list of {channels}"
            raise InputError(f"model.data_config[{key!r}] of {model.spec.name} is {value!r}; allowed: {allowed}. Correct it.")
    return partial(_prepare_image, create_transform(tuple(size), **chosen), modes[channels])


def _prepare_image(apply: Callable[[Any], Tensor], mode: str, image: Any) -> Tensor:
    if isinstance(image, str | Path):
        with explain_broken(lambda: str(image)):
            return apply(read_image(Path(image), mode))
    if isinstance(image, Image.Image):
        with explain_broken(lambda: f"in mode {image.mode}"):
            return apply(convert_image(image, mode))
    raise InputError(f"An image is a file or an image of Pillow. Received: {type(image).__name__}.")


def _tokenize_with(model: Model, input: TextInput) -> Callable[[Any], Tensor]:
    if "tokenizer" not in model.data_config:
        raise InputError(
            f"Nothing says which tokenizer {model.spec.name} has: revzoo train saves it with the weights. Set "
            "model.data_config = {'tokenizer': 'tokenizer.json'}, or {'tokenizer': 'bytes'}."
        )
    return partial(_prepare_text, open_tokenizer(model.data_config["tokenizer"], input), input.length)


def _prepare_text(tokenizer: Tokenizer, length: int, text: Any) -> Tensor:
    if not isinstance(text, str):
        raise InputError(f"A text is a string. Received: {type(text).__name__}.")
    return torch.tensor(tokenizer.encode([text], length)[0])
