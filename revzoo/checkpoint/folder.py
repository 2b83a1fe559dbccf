"""Write the folder of a model: its spec.yaml and its weights, in one file or in several with an index.

`revzoo.create` reads it. Converted networks are in folders of this kind, too.
"""

import json
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import cast

from torch import Tensor, nn

from revzoo.checkpoint.files import collect_tensors, describe_spec, write_tensors
from revzoo.errors import InputError
from revzoo.file import write_atomically
from revzoo.spec.names import BEST_WEIGHTS, CONVERTED_WEIGHTS, WEIGHTS_INDEX
from revzoo.spec.schema import Spec

SHARD_BYTES = 5 * 10**9  # as in Transformers: the hub and slow connections prefer files of a few GB
WRITTEN = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")  # names of files of weights


def save_folder(model: nn.Module, folder: Path, shard_bytes: int = SHARD_BYTES) -> None:
    """Write spec.yaml and the weights into a folder. Weights that were written there before are replaced.

    Args:
        model: the model, whose `spec` is written.
        folder: it is made if there is none.
        shard_bytes: most bytes of tensors in a file; a larger tensor has a file of its own.
    Raises:
        InputError: the model has no values, or the folder cannot be made or is that of a run.
    """
    if any(tensor.is_meta for tensor in model.state_dict().values()):
        raise InputError("A model on the meta device has no values to save. Create it on another device.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"No folder can be made at {folder} ({error}). Name another.") from error
    if (folder / BEST_WEIGHTS).exists():
        raise InputError(f"{folder} is the folder of a run, which keeps its own spec and weights. Name another.")
    spec = cast(Spec, model.spec)
    shards = _split(collect_tensors(model), shard_bytes)
    names = [CONVERTED_WEIGHTS]
    if len(shards) > 1:
        names = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    write_atomically(folder / "spec.yaml", partial(Path.write_text, data=spec.to_yaml()))
    for name, tensors in zip(names, shards, strict=True):
        write_tensors(folder / name, tensors, describe_spec(spec))
    if len(shards) > 1:
        places = {key: name for name, tensors in zip(names, shards, strict=True) for key in tensors}
        index = {"metadata": {"total_size": sum(map(_count_bytes, shards))}, "weight_map": places}
        write_atomically(folder / WEIGHTS_INDEX, partial(Path.write_text, data=json.dumps(index, indent=2)))
        names = [*names, WEIGHTS_INDEX]
    for path in folder.iterdir():
        if WRITTEN.fullmatch(path.name) and path.name not in names:
            path.unlink()


def _split(tensors: Mapping[str, Tensor], most: int) -> list[dict[str, Tensor]]:
    """Return the tensors in order, in groups of at most `most` bytes or of one tensor."""
    shards = list[dict[str, Tensor]]([{}])
    size = 0
    for key, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > most:
            shards.append({})
            size = 0
        shards[-1][key] = tensor
        size += tensor.nbytes
    return shards


def _count_bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())
