"""Create a model that is to be used and not trained: with the weights that belong to it, in eval mode."""

import os
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from revzoo.checkpoint.files import read_metadata, read_tensors
from revzoo.checkpoint.index import find_folder_weights, read_index
from revzoo.errors import CheckpointError, InputError, join_names
from revzoo.hub import fetch_if_on_hub
from revzoo.model.create import create
from revzoo.model.model import Model
from revzoo.spec.loading import load_spec


def create_trained(source: str | Path, device: torch.device | str = "cpu", checkpoint: Path | None = None) -> Model:
    """Create a model with its weights, in eval mode.

    Args:
        source: folder of a run, of `revzoo convert` or `save_pretrained`; a model of the hub; a model whose weights ship; or a
            safetensors file that one of these has written, since it holds the spec.
        device: of the parameters.
        checkpoint: file of other weights for it.
    Raises:
        InputError: there are no weights.
        UnknownNameError, SpecError, CheckpointError: as for `create`.
    """
    if os.path.isfile(source) and Path(source).suffix == ".safetensors" and checkpoint is None:
        return _create_from_file(Path(source), device)
    load_spec(source)  # raises for names that are unknown, before weights are looked for
    ships = str(source) in read_index()
    own = checkpoint or (None if ships else find_folder_weights(fetch_if_on_hub(source)))
    if own is None and not ships:
        raise InputError(
            f"{source} has no weights. Name the folder of a run (revzoo train), or a model whose weights ship: "
            f"{join_names(sorted(read_index()))}."
        )
    return create(source, pretrained=own is None, checkpoint=own, device=device).eval()


def _create_from_file(file: Path, device: torch.device | str) -> Model:
    read_tensors(file)  # reports a damaged file
    text = read_metadata(file).get("revzoo.spec")
    if text is None:
        raise CheckpointError(f"{file} does not say which network it is for. Name the folder of a run, which has a spec.yaml.")
    with TemporaryDirectory() as folder:
        spec = Path(folder) / "spec.yaml"
        spec.write_text(text, encoding="utf-8")
        return create(spec, checkpoint=file, device=device).eval()
