"""Find the network that a user names by a name, a folder or a module, and its weights."""

import copy
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from revzoo.analysis.dry_run import preserve_random_streams
from revzoo.checkpoint.foreign import read_config, read_weights
from revzoo.errors import ConversionError, InputError, UnknownNameError, did_you_mean
from revzoo.hub import TIMM_PREFIX, TRANSFORMERS_PREFIX, drop_code, fetch_files, fetch_transformers
from revzoo.spec.loading import load_spec
from revzoo.spec.names import hint_at_hub, model_files

_ADAPTER = re.compile(r"\.(base_layer|lora_\w+)\.")  # in the keys of peft's models and adapters
_WITHOUT_WEIGHTS = (
    "Give a file: revzoo convert NAME --weights FILE, or model.checkpoint=FILE in training, where model.pretrained=false "
    "starts from random weights instead."
)


@dataclass(frozen=True)
class Original:
    """A network to be converted.

    Args:
        name: as the user gave it, or the class of a module.
        description: what sources read the architecture from: a timm model, a Transformers configuration, or the name of a spec.
        tensors: its state dict.
        build: returns the network itself in eval mode, from a description and tensors; None where no library here has it.
        folder: with files of Transformers; None for others.
    """

    name: str
    description: Any
    tensors: dict[str, Tensor]
    build: Callable[[Any, Mapping[str, Tensor]], nn.Module] | None
    folder: Path | None = None


def find_original(
    source: str | Path | nn.Module, weights: str | Path | None, check: Callable[[Original], object] = lambda original: None
) -> Original:
    """Return the network to be converted.

    Args:
        source: as for `convert`.
        weights: a weights file or a folder with one; None: those of the module or folder, or the hub's.
        check: raises for what cannot be converted; it gets an original without tensors, before weights are fetched or read.
    Raises:
        ConversionError: no network has this name, or timm's pretrained weights cannot be fetched.
        CheckpointError: the weights cannot be read, or the hub cannot be reached.
        InputError: an argument of another type.
    """
    if weights is not None and not isinstance(weights, str | Path):
        raise InputError(
            f"weights is a file or a folder. Received: {type(weights).__name__}. Load tensors into the module and pass that."
        )
    if isinstance(source, nn.Module):
        network: nn.Module = getattr(source, "_orig_mod", source)  # under torch.compile
        if isinstance(network, nn.DataParallel | nn.parallel.DistributedDataParallel):
            network = network.module
        if any(type(module).__module__.partition(".")[0] == "peft" for module in network.modules()):
            raise _make_adapter_error(type(network).__name__)
        return _from_module(network, None if weights is None else _read_plain_weights(weights))
    if not isinstance(source, str | Path):
        raise InputError(f"A name, a folder or a module can be converted. Received: {type(source).__name__}.")
    if (Path(source) / "adapter_config.json").is_file():
        raise _make_adapter_error(str(source))
    name, folder = str(source), Path(source)
    if name.startswith(TRANSFORMERS_PREFIX):
        folder = fetch_transformers(name, weights=False)  # what cannot be converted is refused before weights are fetched
    if folder.is_dir() and (folder / "config.json").is_file():
        config = read_config(folder)
        check(Original(name, config, {}, None))
        if name.startswith(TRANSFORMERS_PREFIX) and weights is None:
            folder = fetch_transformers(name, weights=True)
        tensors = _read_plain_weights(folder if weights is None else weights)
        return _from_folder(name.removeprefix(TRANSFORMERS_PREFIX).partition("@")[0], config, tensors, folder)
    is_spec = Path(source).suffix == ".yaml" or (Path(source) / "spec.yaml").is_file()
    if name in model_files() or is_spec:
        spec = load_spec(source)
        if weights is None:
            raise ConversionError(f"{name} is reversible already. Give a published checkpoint of it: --weights FILE.")
        return Original(spec.name, source, _read_plain_weights(weights), None)
    bare = name.removeprefix(TIMM_PREFIX)
    if name != bare and not timm.is_model(bare):
        raise UnknownNameError("timm model", bare, timm.list_models())
    if timm.is_model(bare):
        return _from_timm(bare, weights, check)
    if os.path.isfile(source):
        raise ConversionError(
            f"Weights are converted with the name of their network. Received: {name}. Use revzoo convert NAME --weights {name}."
        )
    known = [*timm.list_models(), *model_files()]
    hint = did_you_mean(name, known, 0.75) or hint_at_hub(name)
    raise ConversionError(
        f"No network to convert has the name {name!r}.{hint} Use timm:NAME (timm.list_models()), hf:OWNER/NAME of the hub, a "
        "folder with a Transformers config.json, the name or spec file of a reversible model for its published checkpoints, "
        "or, from Python, a module."
    )


def _make_adapter_error(received: str) -> ConversionError:
    return ConversionError(
        f"The adapters of peft are no layers of a network that can be converted. Received: {received}. Merge them first: "
        "network = peft_model.merge_and_unload(), and convert that; or keep them, and make the base model reversible in place: "
        "revzoo.reversible_(module)."
    )


def _read_plain_weights(path: str | Path) -> dict[str, Tensor]:
    """Return the tensors of a file, or raise ConversionError if they are those of adapters."""
    tensors = read_weights(path)
    if any(_ADAPTER.search(key) for key in tensors):
        raise _make_adapter_error(str(path))
    return tensors


def _from_timm(name: str, weights: str | Path | None, check: Callable[[Original], object]) -> Original:
    if weights is None:
        with preserve_random_streams(()), torch.device("meta"):
            check(Original(name, timm.create_model(name), {}, None))
        return _from_module(_fetch_from_timm(name), None, name)
    tensors = _read_plain_weights(weights)
    classifier = timm.get_pretrained_cfg_value(name, "classifier") or "head"
    head = tensors.get(f"{classifier if isinstance(classifier, str) else classifier[0]}.weight", tensors.get("head.weight"))
    options: dict[str, Any] = {} if head is None else {"num_classes": head.shape[0]}  # another number after fine-tuning

    def make() -> nn.Module:
        return timm.create_model(name, **options)

    with torch.device("meta"):
        description = make()
    return Original(name, description, tensors, lambda _, given: _load(make(), given))


def _fetch_from_timm(name: str) -> nn.Module:
    """Return timm's pretrained network.

    Raises:
        ConversionError: timm has no weights for it, or they can neither be fetched nor are in the hub's cache.
    """
    place = timm.get_pretrained_cfg(name)
    if place is None or not place.has_weights:
        raise ConversionError(f"timm has no pretrained weights of {name}. {_WITHOUT_WEIGHTS}")
    try:
        overlay = {}
        if place.hf_hub_id and not place.hf_hub_filename:  # timm would ask a hub that is out of reach for most of a minute
            overlay = {"state_dict": read_weights(fetch_files(place.hf_hub_id, "model.safetensors"))}
        with preserve_random_streams(()):
            return timm.create_model(name, pretrained=True, pretrained_cfg_overlay=overlay)
    except Exception as error:  # hubs, proxies and file systems raise errors of many kinds
        cause = error.__cause__ or error  # without the advice for networks of Transformers
        reason = str(cause).strip().partition("\n")[0] or type(cause).__name__
        where = f"model.safetensors of https://huggingface.co/{place.hf_hub_id}" if place.hf_hub_id else place.url
        raise ConversionError(
            f"The pretrained weights of timm's {name} cannot be fetched ({reason}), and are not in the hub's cache (HF_HOME). "
            f"Download {where} where there is a connection. {_WITHOUT_WEIGHTS}"
        ) from error


def _from_module(network: nn.Module, tensors: dict[str, Tensor] | None, name: str = "") -> Original:
    if any(map(is_lazy, network.parameters())):
        raise ConversionError(f"This {type(network).__name__} has parameters without a shape. Run it on a batch first.")
    state = network.state_dict()  # an extra state may be no tensor
    own = {key: tensor.detach().cpu() for key, tensor in state.items() if isinstance(tensor, Tensor)}
    if any(tensor.is_meta for tensor in own.values()) and tensors is None:
        raise ConversionError(f"This {type(network).__name__} is on the meta device and has no values. Give its weights.")
    config = getattr(network, "config", None)
    cfg = getattr(network, "pretrained_cfg", None)  # of timm
    shown_name = name or (cfg or {}).get("architecture") or type(network).__name__
    if config is not None and hasattr(config, "to_dict"):
        pooled = getattr(getattr(network, "base_model", network), "pooler", None) is not None
        description: Any = {**config.to_dict(), "architectures": [type(network).__name__]}
        if network is network.base_model:
            description["add_pooling_layer"] = pooled  # the configuration does not say it
    else:
        description = network

    def build(_: Any, given: Mapping[str, Tensor]) -> nn.Module:
        return _load(copy.deepcopy(network).float().cpu(), given)

    has_values = not any(tensor.is_meta for tensor in own.values())
    return Original(shown_name, description, own if tensors is None else tensors, build if has_values else None)


def _from_folder(name: str, config: dict[str, Any], tensors: dict[str, Tensor], folder: Path) -> Original:
    def build(completed: dict[str, Any], given: Mapping[str, Tensor]) -> nn.Module:
        library: Any = import_module("transformers")
        network_class = getattr(library, completed["architectures"][0])
        return _load(network_class(drop_code(network_class.config_class.from_dict(completed))), given)

    return Original(name, config, tensors, build, folder)


def _load(network: nn.Module, tensors: Mapping[str, Tensor]) -> nn.Module:
    """Load the tensors whose keys and shapes the network has; return it in eval mode."""
    own = network.state_dict()
    fitting = {key: tensor for key, tensor in tensors.items() if key in own and own[key].shape == tensor.shape}
    network.load_state_dict(fitting, strict=False)
    return network.eval()
