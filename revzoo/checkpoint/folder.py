"""Write the folder of a model: spec.yaml, the tokenizer, and the weights (in one file, or in several with an index).

`revzoo.create` reads it. Converted networks are in folders of this kind, too.
"""

from functools import partial
from pathlib import Path
from typing import cast

from torch import nn

from revzoo.checkpoint.files import find_weights, save_weights
from revzoo.checkpoint.writing import SHARD_BYTES, call_once
from revzoo.errors import InputError
from revzoo.file import write_text
from revzoo.spec.names import BEST_WEIGHTS, BYTES, CONVERTED_WEIGHTS, TOKENIZER
from revzoo.spec.schema import Spec


def save_folder(model: nn.Module, folder: Path, shard_bytes: int = SHARD_BYTES) -> None:
    """Write spec.yaml, the weights and the tokenizer's file into a folder. What was written there before is replaced.

    Args:
        model: the model, whose `spec` is written.
        folder: it is made if there is none.
        shard_bytes: most bytes of tensors in a file; a larger tensor has a file of its own.
    Raises:
        InputError: the model has no values, or the folder cannot be made or is that of a run.
    """
    if any(tensor.is_meta for tensor in model.state_dict().values()):
        raise InputError("A model on the meta device has no values to save. Create it on another device.")
    call_once(partial(_begin, folder, cast(Spec, model.spec)), model.parameters())
    call_once(partial(_copy_tokenizer, model, folder), model.parameters())
    save_weights(model, folder / CONVERTED_WEIGHTS, shard_bytes=shard_bytes)


def _begin(folder: Path, spec: Spec) -> None:
    """Make the folder and write spec.yaml."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"No folder can be made at {folder} ({error}). Name another.") from error
    if find_weights(folder / BEST_WEIGHTS).exists():
        raise InputError(f"{folder} is the folder of a run, which keeps its own spec and weights. Name another.")
    write_text(folder / "spec.yaml", spec.to_yaml())


def _copy_tokenizer(model: nn.Module, folder: Path) -> None:
    """Write the model's tokenizer into the folder, so that the model can be used elsewhere, if it is a file that is there."""
    name, target = getattr(model, "data_config", {}).get("tokenizer", BYTES), folder / TOKENIZER
    if name == BYTES:  # also for a model of images: what another model left there is not its own
        target.unlink(missing_ok=True)
        return
    source = Path(name)
    if source.is_file() and not (target.exists() and target.samefile(source)):
        write_text(target, source.read_text(encoding="utf-8"))
