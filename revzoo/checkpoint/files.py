"""Save and load weights: safetensors files with the spec in their metadata, shards with an index, pickled state dicts.

A file either fits the model, with the same keys and shapes, or nothing of it is loaded.
"""

import os
import warnings
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import torch
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from yaml import YAMLError

from revzoo.checkpoint.facts import collect_facts, restore_facts
from revzoo.checkpoint.slices import find_own_slice, get_own_part
from revzoo.checkpoint.writing import SHARD_BYTES, write_weights
from revzoo.device import is_sharded
from revzoo.errors import CheckpointError, SpecError, join_names
from revzoo.file import parse_json
from revzoo.spec.loading import parse_spec
from revzoo.spec.names import INDEX_SUFFIX, find_beside
from revzoo.spec.parsing import to_plain
from revzoo.spec.schema import STATEMENTS, Spec
from revzoo.spec.tree import find_differences

_WRAPPERS = ("module.", "_orig_mod.")  # prefixes that DistributedDataParallel and torch.compile add to every key
_CPU = torch.device("cpu")  # as a context it sets aside the user's default device, which may be meta
_NOT_COMPARED = (*STATEMENTS, "block.f", "block.g")  # keys of a spec that its digest leaves out


def save_weights(
    model: nn.Module, path: str | Path, metadata: Mapping[str, str] | None = None, *, shard_bytes: int = SHARD_BYTES
) -> None:
    """Write the model's state dict to a safetensors file, with spec, names of classes and preprocessing in its metadata.

    All processes among which a model is divided call this; the first one writes, and holds one file's tensors at a time.

    Args:
        model: the model, whose `spec`, `class_names` and `data_config` are stored too.
        path: the file; it is written completely or not at all.
        metadata: more strings to store with the weights, for example a metric.
        shard_bytes: weights of more bytes are written to several files and an index, NAME.safetensors.index.json, which is
            read wherever NAME.safetensors is named.
    """
    facts = {**describe_spec(cast(Spec, model.spec)), **collect_facts(model), **(metadata or {})}
    tied = _find_tied(model)
    tensors = {key: tensor for key, tensor in model.state_dict().items() if key not in tied}
    write_weights(Path(path), tensors, facts, shard_bytes)


def describe_spec(spec: Spec) -> dict[str, str]:
    """Return what a file of weights says about their model in its metadata."""
    return {"revzoo.spec": spec.to_yaml(), "revzoo.digest": spec.digest}


def load_weights(model: nn.Module, path: str | Path, *, original: nn.Module | None = None) -> None:
    """Load a file of weights into a model that has exactly the same keys and shapes.

    Names of classes and preprocessing in the file become the model's. Prefixes that wrappers add to every key (`module.`,
    `_orig_mod.`) are removed. A warning names the differences if the file was saved with another spec: some, such as the
    number of heads or the coupling, do not show in the tensors.

    Args:
        model: the model. On the meta device its parameters become the file's tensors, on the CPU. If it is divided over
            processes, which then have memory for their parts, each of them reads its own slices of safetensors files.
        path: a safetensors file, a pickled state dict, or the index of several files.
        original: the model, on the meta device, that the file must fit, if `model` has another head: tensors that it does not
            have, or that have another shape there, stay as they are.

    Raises:
        CheckpointError: the file is missing or damaged, is not a state dict, or does not fit the model. The message lists every
            missing or unexpected key, every other shape, every integer tensor in place of a floating-point one (and the
            reverse), and every tied tensor that is stored twice with different values. The model is then unchanged.
    """
    original = original or model
    path, spec = Path(path), cast(Spec, original.spec)
    contents, metadata = _read_all(path)
    tensors = strip_wrappers(contents)
    own, tied = original.state_dict(), _find_tied(original)
    untied = [
        key for key, first in tied.items() if {key, first} <= tensors.keys() and not _are_equal(tensors[key], tensors[first])
    ]
    tensors |= {key: tensors[first] for key, first in tied.items() if first in tensors}
    problems = {
        **_compare_tensors(tensors, own),
        "of other values": [f"{key}, which is {tied[key]} in this model" for key in untied],
    }
    if any(problems.values()):
        other = len(problems["missing"]) == len(own)  # it is of another network, whose tensors nobody wants to read
        rows = [
            f"\n  {len(keys)} {problem}: {join_names(keys, 4 if other else 1000)}" for problem, keys in problems.items() if keys
        ]
        foreign = " Weights of timm and Transformers are converted: revzoo convert NAME --weights FILE --out DIR."
        raise CheckpointError(
            f"{path} does not fit {spec.name}, which has {len(own)} tensors; nothing was loaded.{''.join(rows)}\n"
            "Create the model it was saved from (a run's folder holds its spec.yaml), or pass the same overrides."
            f"{foreign if other else ''}"
        )
    if metadata.get("revzoo.digest", spec.digest) != spec.digest:
        differing = join_names(compare_specs(metadata.get("revzoo.spec", ""), spec))
        warnings.warn(f"{path} fits {spec.name}, but was saved from another spec. Differing: {differing}.", stacklevel=2)
    state = model.state_dict()
    own = {key: tensor for key, tensor in state.items() if key in own and tensor.shape == own[key].shape}
    read = {key: tensors[key][find_own_slice(t)] if is_sharded(t) else tensors[key] for key, t in own.items()}
    if damaged := find_not_finite(read):
        warnings.warn(f"{path} holds infinities or NaN in {len(damaged)} tensors: {join_names(damaged, most=4)}.", stacklevel=2)
    if any(map(is_sharded, own.values())):
        _fill(model, own, read)
    else:
        _load_whole(model, read, tied)
    restore_facts(model, metadata, path, has_new_head=len(own) < len(state))


def _fill(model: nn.Module, own: Mapping[str, Tensor], read: Mapping[str, Tensor]) -> None:
    """Copy what a process has read into its parts of a model, and make the constant tables, which are not saved."""
    for key, tensor in own.items():
        get_own_part(tensor).copy_(read[key])
    for module in model.modules():
        for key, tensor in _build_constants(module).items():
            module.get_buffer(key).copy_(tensor)


def _load_whole(model: nn.Module, tensors: Mapping[str, Tensor], tied: Mapping[str, str]) -> None:
    on_meta = any(tensor.is_meta for tensor in model.state_dict().values())
    model.load_state_dict(tensors, strict=False, assign=on_meta)
    if on_meta:
        for key, first in tied.items():  # `assign` has given each of them a parameter of its own
            _set_tensor(model, key, model.get_parameter(first))
        for module in model.modules():
            for key, tensor in _build_constants(module).items():
                _set_tensor(module, key, tensor)


def _build_constants(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's constant tables, which no file holds, on the CPU."""
    with _CPU:
        constants: dict[str, Tensor] = getattr(module, "build_constants", dict)()
    return constants


def _compare_tensors(tensors: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """Return why a file's tensors cannot be loaded, by kind of problem."""
    common = [key for key in own if key in tensors]
    return {
        "missing": [key for key in own if key not in tensors],
        "unexpected": [key for key in tensors if key not in own],
        "of another shape": [
            f"{key} {tuple(tensors[key].shape)} instead of {tuple(own[key].shape)}"
            for key in common
            if tensors[key].shape != own[key].shape
        ],
        "of another kind": [
            f"{key} {tensors[key].dtype} instead of {own[key].dtype}"
            for key in common
            if tensors[key].is_floating_point() != own[key].is_floating_point()
        ],
    }


def find_not_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the tensors that hold infinities or NaN."""
    floats = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}
    if not floats:
        return []
    device = next(iter(floats.values())).device  # offloaded parameters are on another one than buffers
    finite = torch.stack([torch.isfinite(tensor).all().to(device) for tensor in floats.values()]).tolist()
    return [name for name, each in zip(floats, finite, strict=True) if not each]


def _set_tensor(module: nn.Module, key: str, tensor: Tensor) -> None:
    """Set the parameter or buffer at the dotted path `key`."""
    owner, _, name = key.rpartition(".")
    setattr(module.get_submodule(owner), name, tensor)


def _are_equal(left: Tensor, right: Tensor) -> bool:
    return left.shape == right.shape and left.dtype == right.dtype and torch.equal(left, right)


def _find_tied(model: nn.Module) -> dict[str, str]:
    """Return the tied tensors: each key whose tensor an earlier key has too, with that earlier key."""
    first: dict[int, str] = {}
    tensors = model.state_dict(keep_vars=True)
    return {key: first[id(t)] for key, t in tensors.items() if first.setdefault(id(t), key) != key}


def read_tensors(path: str | Path) -> dict[str, Tensor]:
    """Read the tensors of a safetensors file, a pickled state dict, or the shards of an index, on the CPU.

    Raises:
        CheckpointError: a file is missing or damaged, or is a pickle with other objects than tensors.
    """
    return _read_all(Path(path))[0]


def _read_all(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors and metadata of a file, or of the shards of an index; safetensors are mapped, not yet read."""
    path = find_weights(path)
    return _read_shards(path) if path.name.endswith(INDEX_SUFFIX) else _read_file(path)


def find_weights(path: Path) -> Path:
    """Return the file of weights that was written at a path: its index where that was written instead, else the path itself."""
    index = Path(f"{path}{INDEX_SUFFIX}")
    return index if os.path.isfile(index) and not os.path.isfile(path) else path


def _read_file(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return tensors and metadata. A file that is not safetensors is read as a pickle, whatever its name."""
    if not os.path.isfile(path):  # unlike pathlib's, it does not raise for a name that no file can have
        raise CheckpointError(f"No weights file at {str(path)[:300]}.{find_beside(str(path)) or ' Name one that is there.'}")
    path.open("rb").close()  # where it may not be read, safetensors would say that there is no file
    with suppress(SafetensorError), _CPU:
        return load_file(path), read_metadata(path)
    try:
        with path.open("rb") as stream:  # torch would judge a path by its suffix
            state = torch.load(stream, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged bytes make it raise anything, KeyError included
        remedy = "Copy it again, or take another, such as last.safetensors of a run"
        if path.suffix != ".safetensors":
            remedy = "Save its state dict as safetensors: safetensors.torch.save_file(model.state_dict(), FILE)"
        raise CheckpointError(
            f"{path} cannot be read: it is truncated, not a weights file, or a pickle that holds more than tensors, which is "
            f"never executed. {remedy}."
        ) from error
    for wrapper in ("state_dict", "model", "model_state", "state_dict_ema", "model_ema", "module", "net", "params"):
        if isinstance(state, dict) and isinstance(state.get(wrapper), dict):
            state = state[wrapper]
    if not isinstance(state, dict) or not all(isinstance(k, str) and isinstance(t, Tensor) for k, t in state.items()):
        raise CheckpointError(
            f"{path} holds no state dict (names to tensors). Received: {_describe_contents(state)}. Save the model again: "
            "torch.save(model.state_dict(), FILE)."
        )
    return state, {}


def _describe_contents(state: object) -> str:
    return f"a dict of {join_names([str(key)[:30] for key in state], 4)}" if isinstance(state, dict) else type(state).__name__


def _read_places(index: Path) -> dict[str, str]:
    """Return the file of each tensor of an index, after checking that the files are there."""
    places = read_json(index, "an index of shards").get("weight_map")
    if not isinstance(places, dict) or not places or not all(isinstance(name, str) for name in places.values()):
        raise CheckpointError(
            f"{index} is not an index of shards: it has no weight_map from tensors to files. Received: {str(places)[:80]}. "
            "Fetch the checkpoint again."
        )
    names = sorted(set(places.values()))
    if elsewhere := [name for name in names if Path(name).name != name]:
        raise CheckpointError(
            f"{index} names files outside its own folder. Received: {join_names(elsewhere)}. Write plain names."
        )
    if missing := [name for name in names if not (index.parent / name).is_file()]:
        raise CheckpointError(
            f"{index} names {len(names)} shards, of which {len(missing)} are missing: {join_names(missing)}. Fetch them into "
            f"{index.parent}."
        )
    return places


def _read_shards(index: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors of all shards of an index, also those that the index does not list, and the first one's metadata."""
    places = _read_places(index)
    tensors: dict[str, Tensor] = {}
    facts: dict[str, str] = {}
    for name in sorted(set(places.values())):
        shard, metadata = _read_file(index.parent / name)
        facts = facts or metadata
        _refuse_missing(index, name, (key for key, place in places.items() if place == name and key not in shard))
        tensors |= {key: tensor for key, tensor in shard.items() if places.get(key, name) == name}
    return tensors, facts


def _refuse_missing(index: Path, name: str, absent: Iterable[str]) -> None:
    if lacking := list(absent):
        raise CheckpointError(
            f"{index.parent / name} lacks {len(lacking)} tensors that {index.name} says it holds: {join_names(lacking)}. The "
            "two are not of the same checkpoint: fetch both again."
        )


def read_json(path: Path, what: str) -> dict[str, Any]:
    """Return the mapping in a JSON file, which should be `what`."""
    if not path.is_file():
        raise CheckpointError(f"{path} is missing; it should be {what}.")
    try:
        content = parse_json(path.read_bytes())
    except (OSError, ValueError) as error:  # no text, or no JSON
        reason = str(error).partition("\n")[0]
        raise CheckpointError(f"{path} cannot be read as JSON ({reason}). Fetch it again.") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is not {what}: a mapping in JSON. Received: {type(content).__name__}.")
    return content


def compare_specs(text: str, spec: Spec) -> list[str]:
    """Return the dotted paths at which a spec differs from the YAML text of a saved one."""
    try:
        saved: Any = OmegaConf.to_container(OmegaConf.create(text))
        saved = to_plain(parse_spec(saved, "the saved spec"))
    except (SpecError, OmegaConfBaseException, YAMLError, ValueError, AssertionError, AttributeError):
        return []  # no YAML, no mapping, or no spec of this version
    return [path for path in find_differences(to_plain(spec), saved) if not path.startswith(_NOT_COMPARED)]


def read_metadata(path: str | Path) -> dict[str, str]:
    """Read the metadata of a safetensors file, or of the first one of an index: what `save_weights` stored with the tensors."""
    path = find_weights(Path(path))
    if path.name.endswith(INDEX_SUFFIX):
        path = path.with_name(min(_read_places(path).values()))
    with safe_open(path, "pt") as file:
        return dict(file.metadata() or {})


def strip_wrappers(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Remove the prefixes that wrappers (DistributedDataParallel, torch.compile) add to every key."""
    for prefix in _WRAPPERS * 2:  # either may be outermost
        if tensors and all(key.startswith(prefix) for key in tensors):
            tensors = {key.removeprefix(prefix): tensor for key, tensor in tensors.items()}
    return tensors
