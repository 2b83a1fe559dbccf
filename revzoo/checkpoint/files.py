"""Weights files: safetensors with the spec in their metadata, and pickled state dicts.

A checkpoint either fits the model key by key and shape by shape, or nothing of it is loaded.
"""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from yaml import YAMLError

from revzoo.errors import CheckpointError, listing
from revzoo.file import write_atomically
from revzoo.spec.parsing import to_plain
from revzoo.spec.schema import Spec
from revzoo.spec.tree import join

_WRAPPERS = ("module.", "_orig_mod.")  # what DistributedDataParallel and torch.compile put in front of every key
_STATEMENTS = ("name", "sources", "expect", "twin", "block.f", "block.g")  # what a spec's digest leaves out


def save_weights(model: nn.Module, spec: Spec, path: str | Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write the model's state dict as safetensors, complete or not at all, with its spec in the metadata.

    Args:
        metadata: further strings to keep with the weights, for example a metric.
    """
    shared = _shared(model)
    tensors = {key: t.detach().cpu().contiguous() for key, t in model.state_dict().items() if key not in shared}
    facts = {"format": "pt", "revzoo.spec": spec.to_yaml(), "revzoo.digest": spec.digest, **(metadata or {})}
    write_atomically(Path(path), lambda partial: save_file(tensors, partial, metadata=facts))


def load_weights(model: nn.Module, spec: Spec, path: str | Path) -> None:
    """Load a state dict into a model whose keys and shapes it matches exactly.

    Warns where the file holds the digest of another spec, and names what differs: heads or a coupling have no tensors.
    Prefixes that wrappers put in front of every key (`module.`, `_orig_mod.`) are taken off.

    Raises:
        CheckpointError: no such file, damaged, not a state dict, or of another model: every missing, unexpected and
            misshapen key, every integer in place of a number, and every copy of a tied tensor that is none, is listed with
            counts. The model is then unchanged.
    """
    path = Path(path)
    found, metadata = _contents(path)
    tensors = strip_wrappers(found)
    own, shared = model.state_dict(), _shared(model)
    untied = [
        key for key, first in shared.items() if {key, first} <= tensors.keys() and not _same(tensors[key], tensors[first])
    ]
    tensors |= {key: tensors[first] for key, first in shared.items() if first in tensors}
    problems = {
        "missing": [key for key in own if key not in tensors],
        "unexpected": [key for key in tensors if key not in own],
        "of another shape": [
            f"{key} {tuple(tensors[key].shape)} instead of {tuple(own[key].shape)}"
            for key in own
            if key in tensors and tensors[key].shape != own[key].shape
        ],
        "of another kind": [
            f"{key} {tensors[key].dtype} instead of {own[key].dtype}"
            for key in own
            if key in tensors and tensors[key].is_floating_point() != own[key].is_floating_point()
        ],
        "of other values": [f"{key}, which is {shared[key]} in this model" for key in untied],
    }
    if any(problems.values()):
        rows = [f"\n  {len(keys)} {what}: {listing(keys, most=1000)}" for what, keys in problems.items() if keys]
        raise CheckpointError(
            f"{path} does not fit {spec.name}, which has {len(own)} tensors; nothing was loaded.{''.join(rows)}\n"
            "Create the model it was saved from (a run's folder holds its spec.yaml), or pass the same overrides."
        )
    if metadata.get("revzoo.digest", spec.digest) != spec.digest:
        differing = listing(_differences(metadata.get("revzoo.spec", ""), spec))
        warnings.warn(f"{path} fits {spec.name}, but was saved from another spec. Differing: {differing}.", stacklevel=2)
    on_meta = any(tensor.is_meta for tensor in own.values())
    model.load_state_dict(tensors, assign=on_meta)
    if on_meta:  # every key was assigned a parameter of its own
        for key, first in shared.items():
            owner, _, name = key.rpartition(".")
            setattr(model.get_submodule(owner), name, model.get_parameter(first))
        for module in model.modules():  # tables that no file holds
            for key, tensor in getattr(module, "constants", dict)().items():
                owner, _, name = key.rpartition(".")
                setattr(module.get_submodule(owner), name, tensor)


def _same(left: Tensor, right: Tensor) -> bool:
    return left.shape == right.shape and left.dtype == right.dtype and torch.equal(left, right)


def _shared(model: nn.Module) -> dict[str, str]:
    """Return, for every key whose tensor an earlier key has as well (a tied embedding), that key."""
    first: dict[int, str] = {}
    tensors = model.state_dict(keep_vars=True)
    return {key: first[id(t)] for key, t in tensors.items() if first.setdefault(id(t), key) != key}


def read_tensors(path: str | Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file or of a pickled state dict, on the CPU.

    Raises:
        CheckpointError: no such file, damaged, or a pickle that holds anything but tensors.
    """
    return _contents(Path(path))[0]


def _contents(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return tensors and metadata; what is no safetensors file, whatever its name, is read as a pickle."""
    if not path.is_file():
        raise CheckpointError(f"No weights file at {path}.")
    with suppress(SafetensorError), safe_open(path, "pt") as file:
        return dict(_items(file)), dict(file.metadata() or {})
    try:
        with path.open("rb") as stream:  # of a path, torch would believe the suffix
            found = torch.load(stream, map_location="cpu", weights_only=True)
    except Exception as error:  # the reader answers damaged bytes with whatever it stumbles over, KeyError included
        raise CheckpointError(
            f"{path} cannot be read: it is truncated, not a weights file, or a pickle that holds more than tensors, which is "
            f"never executed. Received: {type(error).__name__}. Save it again as safetensors."
        ) from error
    for wrapper in ("state_dict", "model", "model_state", "state_dict_ema", "model_ema", "module", "net", "params"):
        if isinstance(found, dict) and isinstance(found.get(wrapper), dict):
            found = found[wrapper]
    if not isinstance(found, dict) or not all(isinstance(k, str) and isinstance(t, Tensor) for k, t in found.items()):
        raise CheckpointError(f"{path} holds no state dict (names to tensors). Received: {type(found).__name__}.")
    return found, {}


def _differences(text: str, spec: Spec) -> list[str]:
    """Return the dotted paths at which the YAML text of a spec differs from a spec."""
    try:
        theirs = dict(_leaves(OmegaConf.to_container(OmegaConf.create(text))))
    except (OmegaConfBaseException, YAMLError):
        return []
    ours = dict(_leaves(to_plain(spec)))
    paths = [path for path in {**ours, **theirs} if (path in ours, ours.get(path)) != (path in theirs, theirs.get(path))]
    return [path for path in paths if not path.startswith(_STATEMENTS)]


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every scalar of nested mappings and lists, with its dotted path."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if items is None:
        yield path, value
    else:
        for key, item in items:
            yield from _leaves(item, join(path, key))


def _items(file: Any) -> Iterator[tuple[str, Tensor]]:
    for key in file.keys():  # noqa: SIM118 - an open safetensors file is no mapping
        yield key, file.get_tensor(key)


def read_metadata(path: str | Path) -> dict[str, str]:
    """Return what `save` wrote beside the tensors of a safetensors file."""
    with safe_open(path, "pt") as file:
        return dict(file.metadata() or {})


def strip_wrappers(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors without what wrappers (DistributedDataParallel, torch.compile) put in front of every key."""
    for prefix in _WRAPPERS * 2:  # either may be outermost
        if tensors and all(key.startswith(prefix) for key in tensors):
            tensors = {key.removeprefix(prefix): tensor for key, tensor in tensors.items()}
    return tensors
