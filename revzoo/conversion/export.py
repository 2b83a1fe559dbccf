"""The way back: write a converted network's tensors under the original's keys."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from revzoo.checkpoint.foreign import read_weights
from revzoo.checkpoint.index import find_folder_weights
from revzoo.checkpoint.writing import match_written, write_tensors
from revzoo.conversion.mapping import TensorMapping
from revzoo.conversion.report import TensorRow
from revzoo.errors import ConversionError, InputError, RevzooError, join_names
from revzoo.file import parse_json
from revzoo.spec.names import CONVERSION, CONVERTED_WEIGHTS, UNUSED_WEIGHTS


def export(folder: str | Path, out: str | Path, weights: str | Path | None = None) -> int:
    """Write the tensors of a converted network under the original's keys, as safetensors; return their number.

    The folder's report lists the tensors of the original and their changes, which are undone here. Tensors that were dropped
    are not written; those that the converted network does not use are the original's, unchanged. The folder's own weights get
    the original's dtypes back; other weights keep theirs.

    Args:
        folder: a folder that `convert` wrote, or a run that has converted its network.
        out: the file to write.
        weights: of the converted network after fine-tuning; None: the folder's own.
    Raises:
        InputError: the file cannot be written, or its name does not end in .safetensors.
        ConversionError: `convert` of this version did not write the folder, or the weights belong to another network.
        CheckpointError: the weights cannot be read.
    """
    folder = Path(folder)
    out = _check_output(out, folder)
    report = folder / "report.json"
    if (folder / CONVERSION).is_file():  # a run, which has made the network reversible itself
        report, weights = folder / CONVERSION, weights or find_folder_weights(folder)
    try:
        rows = _read_rows(report)
        tensors = read_weights(folder if weights is None else weights)
        exported = _restore_tensors(folder, rows, tensors, dtypes=weights is None)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:
        if isinstance(error, RevzooError):
            raise
        raise ConversionError(
            f"{folder} is not a folder that revzoo convert wrote: {report} cannot be used. Convert again, or write any other "
            "network with --onnx FILE.onnx."
        ) from error
    out.parent.mkdir(parents=True, exist_ok=True)
    contiguous = {key: tensor.clone().contiguous() for key, tensor in exported.items()}
    try:
        write_tensors(out, contiguous, {})
    except (OSError, SafetensorError) as error:
        raise InputError(f"{out} cannot be written ({error}). Name another file.") from error
    return len(exported)


def _read_rows(report: Path) -> list[TensorRow]:
    """Return the rows of a report.json."""
    rows = parse_json(report.read_bytes())["rows"]
    return [TensorRow(**{key: _to_tuples(value) for key, value in row.items()}) for row in rows]


def _restore_tensors(folder: Path, rows: Sequence[TensorRow], tensors: Mapping[str, Tensor], dtypes: bool) -> dict[str, Tensor]:
    """Return the tensors under the original's keys.

    Args:
        dtypes: whether to give them the original's dtypes as well.
    """
    unused = [row.theirs[0] for row in rows if row.action == "unused"]
    file = folder / UNUSED_WEIGHTS
    has_unused = unused and not (folder / CONVERSION).is_file()  # a run does not keep them
    restored = {key: tensor for key, tensor in read_weights(file).items() if key in unused} if has_unused else {}
    for row in rows:
        if missing := [key for key in row.ours if key not in tensors]:
            raise ConversionError(f"The weights are not for the network in {folder}: {join_names(missing)} is missing.")
        mapping = TensorMapping(row.ours, row.theirs, row.transform, original_shapes=row.original_shapes)
        theirs = mapping.to_theirs([tensors[key] for key in row.ours])
        if dtypes and row.original_dtypes:
            theirs = [t.to(getattr(torch, dtype)) for t, dtype in zip(theirs, row.original_dtypes, strict=True)]
        restored |= dict(zip(row.theirs, theirs, strict=False))  # of dropped tensors there is nothing to restore
    if not restored:
        raise ValueError("no rows")
    return restored


def _check_output(out: str | Path, folder: Path) -> Path:
    """Return the file to write, or raise InputError."""
    if not isinstance(out, str | Path) or Path(out).suffix != ".safetensors" or Path(out).is_dir():
        raise InputError(f"Tensors are exported as safetensors. Received: {out!r}. Use a name such as back.safetensors.")
    name = Path(out).name
    if Path(out).resolve().parent == folder.resolve() and (
        name == UNUSED_WEIGHTS or match_written(Path(CONVERTED_WEIGHTS)).fullmatch(name)
    ):
        raise InputError(f"{out} is the converted network itself. Name another file.")
    return Path(out)


def _to_tuples(value: Any) -> Any:
    return tuple(_to_tuples(item) for item in value) if isinstance(value, list) else value
