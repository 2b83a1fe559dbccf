"""Build the ordinary network that a spec names as its twin, to compare the reversible one with."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import timm
import torch
from torch import nn

from revzoo.analysis.resnet import RESNETS, ResNet
from revzoo.hub import drop_code
from revzoo.spec.schema import ImageInput, Spec


def build_twin(spec: Spec, device: torch.device | str = "meta") -> nn.Module | str:
    """Return a spec's twin with new weights, or the reason why it cannot be built.

    It has the spec's input size, channels and number of outputs, unless the twin's `arguments` in the spec say otherwise.
    Nothing is downloaded.

    Args:
        spec: of the reversible network.
        device: of the twin's tensors. On "meta" no memory is allocated.
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
        with torch.device(device):
            return _LIBRARIES[library](spec, name, arguments)
    except Exception as error:  # libraries are missing, or raise anything for a name or an argument that they do not take
        return f"{library} cannot build {name} for {spec.name}: {type(error).__name__}: {error}".partition("\n")[0]


def _build_from_timm(spec: Spec, name: str, arguments: dict[str, Any]) -> nn.Module:
    if not timm.is_model(name):  # a spec may name one of the hub
        raise ValueError("timm has no such model")
    defaults: dict[str, Any] = _outputs(spec, "num_classes")
    if isinstance(spec.input, ImageInput):
        defaults["in_chans"] = spec.input.channels
        config = timm.get_pretrained_cfg(name)
        if config is not None and config.fixed_input_size:  # the others take any size and refuse the argument
            defaults["img_size"] = tuple(spec.input.size)
    return timm.create_model(name, **(defaults | arguments))


def _build_from_transformers(spec: Spec, name: str, arguments: dict[str, Any]) -> nn.Module:
    network: Any = getattr(import_module("transformers"), name)
    return network(drop_code(network.config_class(**(_outputs(spec, "num_labels") | arguments))))


def _build_from_revzoo(spec: Spec, name: str, arguments: dict[str, Any]) -> nn.Module:
    if not isinstance(spec.input, ImageInput):
        raise TypeError("its input is no image")
    defaults: dict[str, Any] = {"channels": spec.input.channels, "size": tuple(spec.input.size)}
    return ResNet(RESNETS[name], **(defaults | _outputs(spec, "outputs") | arguments))


def _outputs(spec: Spec, key: str) -> dict[str, Any]:
    """Return the number of outputs under the library's name for it; nothing for a language model, which has its vocabulary."""
    return {key: spec.head.arguments["outputs"]} if "outputs" in spec.head.arguments else {}


_LIBRARIES: dict[str, Callable[[Spec, str, dict[str, Any]], nn.Module]] = {
    "timm": _build_from_timm,
    "transformers": _build_from_transformers,
    "revzoo": _build_from_revzoo,
}
