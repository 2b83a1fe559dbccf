"""Find weights: those that ship with revzoo, and those in a folder that `convert`, `train` or `save_pretrained` wrote."""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from omegaconf import OmegaConf

from revzoo.errors import CheckpointError, UnknownNameError, quote
from revzoo.hub import fetch_if_on_hub
from revzoo.spec.names import BEST_WEIGHTS, CONVERTED_WEIGHTS, data_root, model_files


@dataclass(frozen=True)
class WeightsEntry:
    """One entry of the index of shipped weights.

    Args:
        file: file name in the weights folder.
        sha256: checksum of the file, in hex.
        digest: digest of the spec that the weights were trained with.
        metric: name and value that `revzoo eval NAME` must reproduce, for example {"top1": 98.9} [%].
        command: the command that trained the weights.
    """

    file: str
    sha256: str
    digest: str
    metric: Mapping[str, float]
    command: str


def read_index() -> dict[str, WeightsEntry]:
    """Read the index of shipped weights: one entry by model name."""
    path = data_root() / "weights" / "index.yaml"
    rows = OmegaConf.to_container(OmegaConf.load(path)) if path.is_file() else {}
    assert isinstance(rows, dict)
    return {str(name): WeightsEntry(**row) for name, row in rows.items()}


def find_shipped_weights(name: str) -> Path:
    """Return the file of a model's shipped weights, after checking its checksum.

    Raises:
        UnknownNameError: no weights ship for this model.
        CheckpointError: the file is missing, or its checksum is not the one in the index.
    """
    rows = read_index()
    if name not in rows:
        hint = f" {name} is a folder: leave pretrained out." if os.path.isdir(name) else ""
        raise UnknownNameError("shipped weights", name, rows, hint)
    path = data_root() / "weights" / rows[name].file
    if not path.is_file():
        raise CheckpointError(f"The weights index names {path}, which is missing. Install revzoo again.")
    if hashlib.sha256(path.read_bytes()).hexdigest() != rows[name].sha256:
        raise CheckpointError(f"{path} is not the file of the weights index (its sha256 differs). Install revzoo again.")
    return path


def find_folder_weights(source: str | Path) -> Path | None:
    """Return the weights next to the spec of a folder: saved or converted ones, or the best of a run.

    None if the source is no folder. Of weights in several files it is their index.

    Raises:
        CheckpointError: there is a spec in the folder, and no weights.
    """
    from revzoo.checkpoint.files import find_weights  # which imports torch: the index is asked before

    source = fetch_if_on_hub(source)
    folder = Path(source)
    if str(source) in model_files() or not os.path.isfile(folder / "spec.yaml"):
        return None
    file, best = find_weights(folder / CONVERTED_WEIGHTS), find_weights(folder / BEST_WEIGHTS)
    if (folder / "report.json").is_file() and not file.is_file():
        raise CheckpointError(f"{folder} was written by revzoo convert, but its {CONVERTED_WEIGHTS} is missing. Convert again.")
    if file.is_file():
        return file
    if not best.is_file() and (folder / "config.yaml").is_file():
        raise CheckpointError(
            f"{folder} is a run without weights: there is no {BEST_WEIGHTS} in it. It gets them at the end of an epoch: revzoo "
            f"train --resume {quote(folder)}"
        )
    if not best.is_file():
        raise CheckpointError(
            f"{folder} has a spec.yaml and no weights: neither {BEST_WEIGHTS} of a run nor {CONVERTED_WEIGHTS} of a converted "
            f"network. Name the file of weights (checkpoint=...), or {folder / 'spec.yaml'} for a network that is not trained."
        )
    return best
