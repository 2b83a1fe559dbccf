"""Read the weights and configurations that other libraries write: one file, shards with an index, or a folder of them."""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from revzoo.checkpoint.files import read_tensors, strip_wrappers
from revzoo.errors import CheckpointError, join_names

_INDEX = ".index.json"
_SHARD = re.compile(r"-\d{5}-of-\d{5}\.\w+$")
_TRANSFORMERS_FILES = (  # in the order in which Transformers looks for them
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".pyth")


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint, on the CPU, without the prefixes of wrappers such as `module.`.

    Args:
        path: a safetensors file or a pickled state dict (read with `weights_only`), the index of a sharded checkpoint, or a
            folder with one of them, as Transformers writes it.
    Raises:
        CheckpointError: there is no file, or several without an index; a file or index is damaged; shards or tensors of the
            index are missing; or a pickle holds more than tensors.
    """
    path = Path(path)
    if path.is_dir():
        path = _find_weights(path)
    if path.name.endswith(_INDEX):
        return strip_wrappers(_read_shards(path))
    if _SHARD.search(path.name) and (index := path.with_name(_SHARD.sub(f"{path.suffix}{_INDEX}", path.name))).is_file():
        raise CheckpointError(f"{path} is one of several shards. Give their index, {index}, or the folder.")
    return strip_wrappers(read_tensors(path))


def read_config(path: str | Path) -> dict[str, Any]:
    """Return a configuration as a mapping.

    Args:
        path: a JSON file, or a folder that holds config.json.
    Raises:
        CheckpointError: there is no such file, or it is not a mapping in JSON.
    """
    path = Path(path)
    return _read_json(path / "config.json" if path.is_dir() else path, "a configuration")


def _find_weights(folder: Path) -> Path:
    """Return the file of weights in a folder: one with a name of Transformers, or the only file of weights."""
    for name in _TRANSFORMERS_FILES:
        if (folder / name).is_file():
            return folder / name
    files = sorted(path for path in folder.iterdir() if path.is_file())
    indices = [path for path in files if path.name.endswith(_INDEX)]
    candidates = indices or [path for path in files if path.suffix in _SUFFIXES]
    if len(candidates) == 1 and not _SHARD.search(candidates[0].name):
        return candidates[0]
    if any(_SHARD.search(path.name) for path in candidates):
        advice = f"These are shards without an index: put model.safetensors{_INDEX} beside them"
    elif candidates:
        advice = "Name one of them"
    else:
        advice = f"Give a folder with {join_names(_TRANSFORMERS_FILES)}, or a file ({', '.join(_SUFFIXES)})"
    names = [path.name for path in candidates or files]
    raise CheckpointError(f"The folder {folder} does not show which weights to read. Received: {join_names(names)}. {advice}.")


def _read_shards(index: Path) -> dict[str, Tensor]:
    """Return the tensors of all shards of an index, also those that the index does not list."""
    places = _read_json(index, "an index of shards").get("weight_map")
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
    tensors: dict[str, Tensor] = {}
    for name in names:
        shard = read_tensors(index.parent / name)
        _refuse_missing(index, name, (key for key, place in places.items() if place == name and key not in shard))
        tensors |= {key: tensor for key, tensor in shard.items() if places.get(key, name) == name}
    return tensors


def _refuse_missing(index: Path, name: str, absent: Iterable[str]) -> None:
    if lacking := list(absent):
        raise CheckpointError(
            f"{index.parent / name} lacks {len(lacking)} tensors that {index.name} says it holds: {join_names(lacking)}. The "
            "two are not of the same checkpoint: fetch both again."
        )


def _read_json(path: Path, what: str) -> dict[str, Any]:
    if not path.is_file():
        raise CheckpointError(f"{path} is missing; it should be {what}.")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # no text, or no JSON
        reason = str(error).partition("\n")[0]
        raise CheckpointError(f"{path} cannot be read as JSON ({reason}). Fetch it again.") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is not {what}: a mapping in JSON. Received: {type(content).__name__}.")
    return content
