"""The way back: a converted network's tensors under the source's names."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from revzoo.conversion.reading import read_weights
from revzoo.conversion.report import Row
from revzoo.errors import ConversionError, InputError, RevzooError, listing
from revzoo.file import write_atomically
from revzoo.spec.names import CONVERTED_WEIGHTS


def export(folder: str | Path, out: str | Path, weights: str | Path | None = None) -> int:
    """Write the tensors of a converted network under the source's names, as safetensors; return their number.

    The report's rows name every tensor of the source; those that were dropped stay so. The folder's own weights get the dtypes
    of the source back as well.

    Args:
        folder: what `convert` wrote.
        out: the file.
        weights: of the converted network after fine-tuning; None: the folder's own.
    Raises:
        InputError: a file that cannot be written there.
        ConversionError: the folder is not a conversion's, or the weights are of another network.
        CheckpointError: weights that cannot be read.
    """
    folder, out = Path(folder), _checked(out, folder)
    file = folder / "report.json"
    try:
        rows = [Row(**{key: _tuples(value) for key, value in row.items()}) for row in json.loads(file.read_text())["rows"]]
        tensors = read_weights(folder / CONVERTED_WEIGHTS if weights is None else weights)
        found = _found(folder, rows, tensors, dtypes=weights is None)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:
        if isinstance(error, RevzooError):
            raise
        raise ConversionError(f"{folder} is not a folder that revzoo convert wrote: {file} cannot be used.") from error
    out.parent.mkdir(parents=True, exist_ok=True)
    contiguous = {key: tensor.clone().contiguous() for key, tensor in found.items()}
    try:
        write_atomically(out, lambda partial: save_file(contiguous, partial, metadata={"format": "pt"}))
    except (OSError, SafetensorError) as error:
        raise InputError(f"{out} cannot be written ({error}). Name another file.") from error
    return len(found)


def _found(folder: Path, rows: Sequence[Row], tensors: Mapping[str, Tensor], dtypes: bool) -> dict[str, Tensor]:
    """Return the tensors under the source's names, with its dtypes if asked to."""
    found: dict[str, Tensor] = {}
    for row in rows:
        if missing := [key for key in row.ours if key not in tensors]:
            raise ConversionError(f"The weights are not of the network in {folder}: {listing(missing)} is missing.")
        back = _back(row, [tensors[key] for key in row.ours]) if row.ours else ()
        if dtypes and row.source_dtypes:
            back = [t.to(getattr(torch, dtype)) for t, dtype in zip(back, row.source_dtypes, strict=True)]
        found |= dict(zip(row.theirs, back, strict=False))  # what was dropped has nothing to give back
    if not found:
        raise ValueError("no rows")
    return found


def _checked(out: str | Path, folder: str | Path) -> Path:
    """Return where to write, or raise InputError."""
    if not isinstance(out, str | Path) or Path(out).suffix != ".safetensors" or Path(out).is_dir():
        raise InputError(f"Tensors are exported as safetensors. Received: {out!r}. Use a name such as back.safetensors.")
    if Path(out).resolve() == (Path(folder) / CONVERTED_WEIGHTS).resolve():
        raise InputError(f"{out} is the converted network itself. Write the file elsewhere.")
    return Path(out)


def _back(row: Row, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return a row's tensors as the source has them."""
    if row.way == "merged":
        return torch.split(tensors[0], [shape[0] for shape in row.source_shapes])
    if row.way == "reshaped":
        (shape,), (tensor,) = row.source_shapes, tensors
        if tensor.dim() == len(shape) == 3:  # positions, in front of which the source has rows that nothing reads
            tensor = torch.nn.functional.pad(tensor, (0, 0, shape[1] - tensor.shape[1], 0), value=1.0)
        return [tensor.reshape(shape)]
    return tensors


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value
