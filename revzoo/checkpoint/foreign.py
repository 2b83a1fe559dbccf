"""Read the weights and configurations that other libraries write: one file, shards with an index, or a folder of them."""

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from revzoo.checkpoint.files import read_json, read_tensors, strip_wrappers
from revzoo.errors import CheckpointError, join_names
from revzoo.spec.names import INDEX_SUFFIX, TENSORFLOW_FILE

_SHARD = re.compile(r"-\d{5}-of-\d{5}\.\w+$")
_TRANSFORMERS_FILES = (  # in the order in which Transformers looks for them
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".pyth", ".index")


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint, on the CPU, without the prefixes of wrappers such as `module.`.

    Args:
        path: a safetensors file or a pickled state dict (read with `weights_only`), the index of a sharded checkpoint, a
            checkpoint of TensorFlow by the name before its suffixes (model.ckpt-600000) or one of its files, or a folder with
            one of them, as Transformers writes it.
    Raises:
        CheckpointError: there is no file, or several without an index; a file or index is damaged; shards or tensors of the
            index are missing; or a pickle holds more than tensors.
    """
    path = Path(path)
    if path.is_dir():
        path = _find_weights(path)
    if not path.is_file() or TENSORFLOW_FILE.search(path.name):
        name = TENSORFLOW_FILE.sub("", path.name)
        if any(TENSORFLOW_FILE.fullmatch(each.name.removeprefix(name)) for each in path.parent.glob("*")):
            return _read_tensorflow(path.with_name(name))
    if _SHARD.search(path.name) and (index := path.with_name(_SHARD.sub(f"{path.suffix}{INDEX_SUFFIX}", path.name))).is_file():
        raise CheckpointError(f"{path} is one of several shards. Give their index, {index}, or the folder.")
    return strip_wrappers(read_tensors(path))


def _read_tensorflow(path: Path) -> dict[str, Tensor]:
    """Return the variables of a checkpoint of TensorFlow, in TensorFlow's layout."""
    try:
        training = import_module("tensorflow").train
    except ImportError as error:
        raise CheckpointError(f"{path} is a checkpoint of TensorFlow, which reads it: pip install tensorflow.") from error
    try:
        reader = training.load_checkpoint(str(path))
        return {name: torch.as_tensor(reader.get_tensor(name)) for name in reader.get_variable_to_shape_map()}
    except Exception as error:  # of TensorFlow
        reason = str(error).strip().partition("\n")[0]
        raise CheckpointError(
            f"{path} cannot be read ({reason}). Copy all of its files again: {path.name}.index and {path.name}.data-..."
        ) from error


def read_config(path: str | Path) -> dict[str, Any]:
    """Return a configuration as a mapping.

    Args:
        path: a JSON file, or a folder that holds config.json.
    Raises:
        CheckpointError: there is no such file, or it is not a mapping in JSON.
    """
    path = Path(path)
    return read_json(path / "config.json" if path.is_dir() else path, "a configuration")


def _find_weights(folder: Path) -> Path:
    """Return the file of weights in a folder: one with a name of Transformers, or the only file of weights."""
    for name in _TRANSFORMERS_FILES:
        if (folder / name).is_file():
            return folder / name
    files = sorted(path for path in folder.iterdir() if path.is_file())
    indices = [path for path in files if path.name.endswith(INDEX_SUFFIX)]
    candidates = indices or [path for path in files if path.suffix in _SUFFIXES]
    if len(candidates) == 1 and not _SHARD.search(candidates[0].name):
        return candidates[0]
    if any(_SHARD.search(path.name) for path in candidates):
        advice = f"These are shards without an index: put model.safetensors{INDEX_SUFFIX} next to them"
    elif candidates:
        advice = "Name one of them"
    else:
        advice = f"Give a folder with {join_names(_TRANSFORMERS_FILES)}, or a file ({', '.join(_SUFFIXES)})"
    names = [path.name for path in candidates or files]
    raise CheckpointError(f"The folder {folder} does not show which weights to read. Received: {join_names(names)}. {advice}.")
