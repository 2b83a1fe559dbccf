"""The ordinary network that a spec names as its twin: what reversibility is compared with."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import timm
import torch
from torch import nn

from revzoo.analysis.resnet import RESNETS, ResNet
from revzoo.spec.schema import ImageInput, Spec


def build_twin(spec: Spec) -> nn.Module | str:
    """Return a spec's twin on the meta device, for the spec's input and number of classes, or why there is none.

    Nothing is downloaded. The twin's `arguments` in the spec go before what is taken from the spec.
    """
    if spec.twin is None:
        return f"{spec.name} names no twin"
    library, name = spec.twin["library"], spec.twin["name"]
    arguments: dict[str, Any] = spec.twin.get("arguments", {})
    if fetching := arguments.keys() & {"pretrained", "checkpoint_path"}:
        return f"a twin has no weights: leave {fetching.pop()} out of its arguments"
    if library not in _LIBRARIES:
        return f"networks of {library} are not built here, only those of {', '.join(_LIBRARIES)}"
    try:
        with torch.device("meta"):
            return _LIBRARIES[library](spec, name, arguments)
    except ImportError:
        return f"{library} is not installed (pip install {library})"
    except _Unknown:
        return f"{library} {import_module(library).__version__} has no {name}"
    except Exception as error:  # libraries answer an argument that they do not take with whatever they stumble over
        return f"{library} cannot build {name} for {spec.name}: {error}".partition("\n")[0]


class _Unknown(Exception):
    """A library has no network of this name."""


def _from_timm(spec: Spec, name: str, arguments: dict[str, Any]) -> nn.Module:
    if not timm.is_model(name):
        raise _Unknown
    found: dict[str, Any] = _outputs(spec, "num_classes")
    if isinstance(spec.input, ImageInput):
        found["in_chans"] = spec.input.channels
        config = timm.get_pretrained_cfg(name)
        if config is not None and config.fixed_input_size:  # the others take any size and refuse the argument
            found["img_size"] = tuple(spec.input.size)
    model: nn.Module = timm.create_model(name, **(found | arguments))
    return model


def _from_transformers(spec: Spec, name: str, arguments: dict[str, Any]) -> nn.Module:
    network: Any = getattr(import_module("transformers"), name, None)
    if getattr(network, "config_class", None) is None:
        raise _Unknown
    model: nn.Module = network(network.config_class(**(_outputs(spec, "num_labels") | arguments)))
    return model


def _from_revzoo(spec: Spec, name: str, arguments: dict[str, Any]) -> nn.Module:
    if name not in RESNETS or not isinstance(spec.input, ImageInput):
        raise _Unknown
    found: dict[str, Any] = {"channels": spec.input.channels, "size": tuple(spec.input.size)}
    return ResNet(RESNETS[name], **(found | _outputs(spec, "outputs") | arguments))


def _outputs(spec: Spec, key: str) -> dict[str, Any]:
    """Return the number of classes under the library's name for it; the outputs of a language model are its vocabulary."""
    return {key: spec.head.arguments["outputs"]} if "outputs" in spec.head.arguments else {}


_LIBRARIES: dict[str, Callable[[Spec, str, dict[str, Any]], nn.Module]] = {
    "timm": _from_timm,
    "transformers": _from_transformers,
    "revzoo": _from_revzoo,
}
