"""Modules that are not the zoo's and a batch for each, by the names that a command line has for them."""

import logging
import os
import textwrap
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from revzoo.errors import CheckpointError, InputError, UnknownNameError, did_you_mean, explain_missing, join_names
from revzoo.hub import TIMM_PREFIX, TRANSFORMERS_PREFIX, drop_code, fetch_transformers, is_foreign
from revzoo.plugin import describe_failure, import_from_here

_logger = logging.getLogger("revzoo")
_LONGEST_TEXT, _SIDE = 512, 224  # tokens; pixels of an image whose size a configuration does not say


def create_named_module(name: str, size: int | None, tokens: int | None = None) -> tuple[nn.Module, Any]:
    """Return a module with random weights, and a random batch for it.

    Args:
        name: "timm:NAME"; "hf:OWNER/NAME" of the hub, or without a connection "hf:" and a kind of Transformers' models, such as
            "hf:gpt2", which has the sizes that are usual for it; a folder with the config.json of a Transformers model; or
            "package.module:function", a function of yours that returns a module and a batch. It is looked for from the present
            folder, too.
        size: examples in the batch; None is 32 images or 8 texts. A function of yours makes its own batch.
        tokens: of each text; None is as many as the network takes, and not more than 512.
    Raises:
        UnknownNameError: timm has no model of that name.
        InputError: there is no such function, or it does not return a module and a batch; or Transformers makes no network for
            images or texts of the folder.
        CheckpointError: the hub does not have the network, or is out of reach.
        RevzooError: Transformers is not installed.
    """
    if name.startswith(TIMM_PREFIX):
        if tokens is not None:
            raise InputError(f"{name} takes images. Received: --tokens {tokens}. Leave it out.")
        return _create_timm(name.removeprefix(TIMM_PREFIX), size or 32)
    if not is_foreign(name):
        return _call_function(name, size, tokens)
    return _create_transformers(name, size or 8, tokens)


def _create_timm(name: str, size: int) -> tuple[nn.Module, Any]:
    import timm

    if not timm.is_model(name):  # it may have a tag
        raise UnknownNameError("timm model", name, timm.list_models())
    model = timm.create_model(name)
    input_size: tuple[int, ...] = cast(Any, model).pretrained_cfg["input_size"]
    return model, torch.randn(size, *input_size)


def _find_config(name: str) -> Any:
    """Return the configuration in a folder or of the hub; if the hub is out of reach or has none, the usual one of a kind."""
    import transformers

    kind = name.removeprefix(TRANSFORMERS_PREFIX)
    try:
        folder = name if kind == name else fetch_transformers(name, weights=False)
    except CheckpointError:
        if kind not in transformers.CONFIG_MAPPING:
            raise
        _logger.warning("The hub does not give %s: its sizes are those that Transformers gives a %s.", name, kind)
        config = transformers.AutoConfig.for_model(kind)
        for networks in (transformers.MODEL_FOR_CAUSAL_LM_MAPPING, transformers.MODEL_FOR_PRETRAINING_MAPPING):
            if type(config) in networks:  # with the head that the hub's have
                config.architectures = [cast(Any, networks[type(config)]).__name__]
        return config
    return drop_code(transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False))


def _create_transformers(name: str, size: int, tokens: int | None) -> tuple[nn.Module, Any]:
    with explain_missing("transformers", "Networks of Transformers"):
        import transformers
    try:
        config = _find_config(name)
        architecture = getattr(transformers, (config.architectures or [""])[0], None)
        if isinstance(architecture, type) and issubclass(architecture, transformers.PreTrainedModel):  # a file names it
            model = architecture(config)
        else:
            model = transformers.AutoModel.from_config(config, trust_remote_code=False)
    except CheckpointError:
        raise
    except Exception as error:  # Transformers raises anything for a configuration that it does not know, or that is damaged
        reason = textwrap.shorten(f"{type(error).__name__}: {error}", 200)
        place = Path(name) / "config.json" if os.path.isdir(name) else name
        raise InputError(f"Transformers makes no network of {place} ({reason}). Correct it there.") from error
    model.train()
    if model.main_input_name == "pixel_values":
        sides = getattr(config, "image_size", _SIDE)
        height, width = (sides, sides) if isinstance(sides, int) else sides
        return model, {"pixel_values": torch.randn(size, getattr(config, "num_channels", 3), height, width)}
    if model.main_input_name != "input_ids" or not hasattr(config, "vocab_size"):
        raise InputError(
            f"Batches are made for networks of images or texts. Received: {name}, a {type(model).__name__}. Name a "
            "function of yours that returns module and batch: package.module:function."
        )
    longest = getattr(config, "max_position_embeddings", None)
    length = tokens or min(_LONGEST_TEXT, longest or _LONGEST_TEXT)
    if longest is not None and length > longest:
        raise InputError(f"{name} takes texts of up to {longest} tokens. Received: --tokens {tokens}.")
    names = ("input_ids", "decoder_input_ids") if config.is_encoder_decoder else ("input_ids",)
    return model, {name: torch.randint(config.vocab_size, (size, length)) for name in names}


def _call_function(name: str, size: int | None, tokens: int | None) -> tuple[nn.Module, Any]:
    module_name, function_name = name.rsplit(":", 1)
    for option, value in (("--batch", size), ("--tokens", tokens)):
        if value is not None:
            raise InputError(f"{name} makes its own batch. Received: {option} {value}. Leave it out.")
    module = import_from_here(module_name)
    function = getattr(module, function_name, None)
    if not callable(function):
        own = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise InputError(
            f"{module_name} has no function {function_name!r}.{did_you_mean(function_name, own)} It has: {join_names(own)}."
        )
    try:
        made = function()
    except Exception as error:  # of a function of the user's
        raise InputError(
            f"{name} cannot be called ({describe_failure(error)}). It takes no arguments, and returns a module and a batch."
        ) from error
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
        raise InputError(f"{name} has to return a module and a batch. Received: {type(made).__name__}.")
    return made
