"""Write tensors as safetensors: one file, or above 5 GB several files and their index.

The tensors may be divided over processes. All of them then take part: each tensor is gathered by itself, and the first process
keeps those of one file at a time, and writes them.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from revzoo.checkpoint.slices import gather_whole
from revzoo.device import is_sharded
from revzoo.file import write_atomically, write_text
from revzoo.spec.names import INDEX_SUFFIX

T = TypeVar("T")
SHARD_BYTES = 5 * 10**9  # as in Transformers: the hub and slow connections prefer files of a few GB


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write tensors to a safetensors file, completely or not at all."""
    facts = {"format": "pt", **metadata}
    write_atomically(path, lambda partial: save_file(tensors, partial, metadata=facts))


def write_weights(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], shard_bytes: int) -> None:
    """Write tensors to a safetensors file; if they are more than `shard_bytes`, to several, and an index that names them.

    For NAME.safetensors the files are NAME-00001-of-00003.safetensors and so on, the index NAME.safetensors.index.json. What
    was written there before is replaced when everything new is written: until then, new files next to old ones have a b in
    their names. If tensors are divided over processes, all processes call this, and the first one writes.

    Args:
        path: the file, whose name ends in .safetensors.
        tensors: by name, on any device, divided over processes or not.
        metadata: strings to store in every file.
        shard_bytes: most bytes of tensors in a file; a larger tensor has a file of its own.
    Raises:
        Exception: writing failed; every process raises what the first one did.
    """
    sharded = any(map(is_sharded, tensors.values()))
    groups = _split({key: tensor.nbytes for key, tensor in tensors.items()}, shard_bytes)
    names = call_once(lambda: _choose_names(path, len(groups)), tensors.values())
    for name, keys in zip(names, groups, strict=True):
        whole = dict[str, Tensor]()
        for key in keys:
            tensor = gather_whole(tensors[key])
            if not sharded or dist.get_rank() == 0:
                whole[key] = tensor.cpu().contiguous()
        call_once(partial(write_tensors, path.with_name(name), whole, metadata), tensors.values())
    places = {key: name for name, keys in zip(names, groups, strict=True) for key in keys}
    total_size = sum(tensor.nbytes for tensor in tensors.values())
    call_once(partial(_publish, path, places, total_size), tensors.values())


def call_once(function: Callable[[], T], tensors: Iterable[Tensor]) -> T:
    """Call a function, of the processes that divide some tensors only in the first one; its result or error is that of all."""
    if not any(map(is_sharded, tensors)):
        return function()
    outcome: list[tuple[Any, Exception | None]] = [(None, None)]
    if dist.get_rank() == 0:
        try:
            outcome = [(function(), None)]
        except Exception as error:
            outcome = [(None, error)]
    dist.broadcast_object_list(outcome)  # else the others would wait for tensors of a process that has ended
    [(result, raised)] = outcome
    if raised is not None:
        raise raised
    return cast(T, result)


def match_written(path: Path) -> re.Pattern[str]:
    """Return a pattern of the names of all files that `write_weights` may write for a path."""
    stem, suffix, index = map(re.escape, (path.stem, path.suffix, INDEX_SUFFIX))
    return re.compile(rf"{stem}((-b)?-\d{{5}}-of-\d{{5}})?{suffix}({index})?")


def _publish(path: Path, places: dict[str, str], total_size: int) -> None:
    """Write the index of several files; then remove what an earlier write has left."""
    new = set(places.values())
    if new != {path.name}:
        index = path.with_name(path.name + INDEX_SUFFIX)
        content = {"metadata": {"total_size": total_size}, "weight_map": places}
        write_text(index, json.dumps(content, indent=2))
        new |= {index.name}
    written = match_written(path)
    for other in path.parent.iterdir():
        if written.fullmatch(other.name) and other.name not in new:
            other.unlink()


def _choose_names(path: Path, count: int) -> list[str]:
    """Return the names of this many files; of several, none that the present index names."""
    if count == 1:
        return [path.name]
    index = path.with_name(path.name + INDEX_SUFFIX)
    used = index.read_text(encoding="utf-8", errors="replace") if index.is_file() else ""
    mark = "-b" if f'"{path.stem}-0' in used else ""
    return [f"{path.stem}{mark}-{i:05d}-of-{count:05d}{path.suffix}" for i in range(1, count + 1)]


def _split(sizes: Mapping[str, int], most: int) -> list[list[str]]:
    """Return the names in order, in groups of at most `most` bytes or of one tensor."""
    groups, total = list[list[str]]([[]]), 0
    for key, size in sizes.items():
        if groups[-1] and total + size > most:
            groups.append([])
            total = 0
        groups[-1].append(key)
        total += size
    return groups
