"""A network that is no model of the zoo yet: made reversible on the way to a run, whose folder then has all that is needed."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from revzoo.checkpoint.files import read_metadata
from revzoo.checkpoint.folder import save_folder
from revzoo.conversion.convert import convert
from revzoo.conversion.report import ConvertReport
from revzoo.errors import InputError
from revzoo.graph.named_module import create_named_module
from revzoo.hub import is_foreign
from revzoo.registry import heads
from revzoo.training.options import ModelOptions


def convert_if_foreign(options: ModelOptions, folder: Path, data: str) -> tuple[ModelOptions, ConvertReport | None]:
    """Return options that name the reversible network, which is written into a folder, and the report of its conversion.

    Args:
        options: what is trained. Its weights are those of the file that it names, of either network; the original's pretrained
            ones if it asks for them; else random ones, as the original starts.
        folder: an empty one.
        data: name of the data. A network that predicts masked words gets a classifier where they are texts with labels.
    Raises:
        ConversionError: it cannot be converted, or its weights are out of reach.
        CheckpointError: the hub is out of reach, or weights cannot be read.
        InputError: Transformers makes no network for the name.
    """
    name, file = options.name, options.checkpoint
    if not is_foreign(name):
        return options, None
    if file is not None and (own := _read_spec(Path(file))):  # weights of the converted network, as a run writes them
        spec = folder / "spec.yaml"
        spec.write_text(own, encoding="utf-8")
        return replace(options, name=str(spec)), None
    source: Any = name
    if not (file is not None or options.pretrained or os.path.isdir(name)):
        source, _ = create_named_module(name, 1)
    report = convert(source, file)
    if data == "text_classification" and "outputs" not in heads.arguments(report.model.spec.head.type):
        report = convert(source, file, num_outputs=options.num_outputs or 2)  # the data set the number later
    out = folder / name.rpartition("/")[2].rpartition(":")[2]
    save_folder(report.model, out)
    if source is not name:
        report = replace(report, expect="Its weights are random: model.pretrained is false.")
    return replace(options, name=str(out), pretrained=False, checkpoint=None), report


def _read_spec(file: Path) -> str | None:
    """Return the spec in a file of weights that revzoo has written; None for another file."""
    if file.suffix != ".safetensors":
        return None
    if not file.is_file():
        raise InputError(f"There is no file {file} with weights to start from. Received: model.checkpoint={file}.")
    return read_metadata(file).get("revzoo.spec")
