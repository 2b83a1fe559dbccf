"""From a pretrained ordinary network to a reversible one: spec, tensors, report; and the way back.

original -> source.spec -> Spec -> build        the same layers, two streams
tensors  -> source.entries                      each tensor under its new name
"""

import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from revzoo.builder import build
from revzoo.conversion.assign import assigned
from revzoo.conversion.compare import compared
from revzoo.conversion.original import Original, find_original
from revzoo.conversion.plot import plot_conversion
from revzoo.conversion.reading import read_weights
from revzoo.conversion.report import Comparison, ConvertReport, Row
from revzoo.conversion.source import Choice, CouplingName, Source
from revzoo.conversion.sources import source_of
from revzoo.errors import ConversionError, InputError, UnknownNameError, listing
from revzoo.model import Model
from revzoo.spec.loading import spec_of
from revzoo.spec.names import CONVERTED_WEIGHTS
from revzoo.weights import save

_EXPECT = {
    "momentum": "Before fine-tuning: the original's answers nearly everywhere. Fine-tune with the recipe `finetune`.",
    "dual_residual": "Before fine-tuning: close to the original, a little further with every layer. Fine-tune with `finetune`.",
    "additive": "Before fine-tuning: another function, whose answers are useless. The weights are a start, no more.",
    "published": "The published network, unchanged in meaning.",
}


def convert(
    source: str | Path | nn.Module,
    weights: str | Path | None = None,
    *,
    coupling: CouplingName = "momentum",
    kept_bits: int | None = 8,
    strength: float | None = None,
    out: str | Path | None = None,
    partial: bool = False,
    batch: Any = None,
) -> ConvertReport:
    """Make a pretrained network reversible.

    Args:
        source: a timm name, a folder with a Transformers config.json, the name of a reversible model of the zoo (for its
            published checkpoints), or a module of timm or Transformers.
        weights: safetensors, .pth or .bin, an index of shards, or a folder with one of these; None: the module's or folder's
            own, or timm's pretrained ones, which a hub is asked for.
        coupling: "momentum", "dual_residual" or "additive".
        kept_bits: s from 0 to 8: b = 2^-s, the lost bits kept, exactly invertible. None: floating point, b = strength.
        strength: m or beta in floating point; 0 is the source's function itself, which cannot be inverted.
        out: folder to write, new or empty: spec.yaml, model.safetensors, report.json, report.txt, report.png.
        partial: go on with missing or extra tensors: missing ones begin fresh, extra ones are dropped.
        batch: examples to compare both networks on; None: random ones.
    Raises:
        ConversionError: nothing is called so, the network has something that cannot be expressed, or the tensors are not its.
        CheckpointError: weights that cannot be read.
        InputError: another argument is not what it must be.
    """
    return converted(
        source, weights, coupling=coupling, kept_bits=kept_bits, strength=strength, out=out, partial=partial, batch=batch
    )[1]


def converted(
    source: str | Path | nn.Module,
    weights: str | Path | None = None,
    *,
    coupling: CouplingName = "momentum",
    kept_bits: int | None = 8,
    strength: float | None = None,
    out: str | Path | None = None,
    partial: bool = False,
    batch: Any = None,
) -> tuple[Model, ConvertReport]:
    """Return the reversible network, in eval mode, and the report; arguments and errors as of `convert`."""
    choice = _choice(coupling, kept_bits, strength)
    folder = None if out is None else _free(Path(out))
    original = find_original(source, weights)
    found = source_of(original)
    description = found.completed(original.description, original.tensors)
    original = replace(original, description=description)
    if found.published:
        choice = Choice("additive", None)
    spec = spec_of({"name": _name(original.name, choice, found), **found.spec(description, choice)}, original.name)
    with torch.device("meta"):
        shapes = build(spec)
    entries = found.entries(description)
    tensors, notes = found.canonical(description, original.tensors)
    rows, values, fitted = assigned(shapes, entries, found, tensors, original, partial)
    torch.manual_seed(0)
    model = build(spec).eval()
    with torch.no_grad():
        model.load_state_dict(values, strict=False)
    comparisons, more = tuple[Comparison, ...](), ["The original was not run: tensors are missing."]
    if not any(row.how == "initialised" for row in rows):
        comparisons, more = _comparisons(model, original, {**tensors, **fitted}, choice, batch)
    model.schedule = "invert"
    expect = _EXPECT["published" if found.published else choice.name]
    coupled = {"type": spec.coupling.type, **spec.coupling.arguments}
    report = ConvertReport(original.name, found.name, coupled, rows, comparisons, (*notes, *more), expect)
    if folder is not None:
        _write(folder, model, report)
    return model, report


def export(folder: str | Path, out: str | Path, weights: str | Path | None = None) -> int:
    """Write the tensors of a converted network under the source's names, as safetensors; return their number.

    Args:
        folder: what `convert` wrote.
        out: the file.
        weights: of the converted network after fine-tuning; None: the folder's own.
    Raises:
        ConversionError: the folder is not a conversion's, or its weights have been changed beyond it.
        CheckpointError: weights that cannot be read.
    Source: the report's rows, which name every tensor of the source; those that were dropped stay so.
    """
    folder, out = Path(folder), Path(out)
    file = folder / "report.json"
    try:
        rows = [Row(**{key: _tuples(value) for key, value in row.items()}) for row in json.loads(file.read_text())["rows"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConversionError(f"{folder} is not a folder that revzoo convert wrote: {file} cannot be read.") from error
    tensors = read_weights(folder / CONVERTED_WEIGHTS if weights is None else weights)
    found: dict[str, Tensor] = {}
    for row in rows:
        if row.how in ("dropped", "initialised"):
            continue
        if missing := [key for key in row.ours if key not in tensors]:
            raise ConversionError(f"The weights are not of the network in {folder}: {listing(missing)} is missing.")
        found |= dict(zip(row.theirs, _back(row, [tensors[key] for key in row.ours]), strict=True))
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(out.name + ".partial")
    save_file({key: tensor.clone().contiguous() for key, tensor in found.items()}, partial, metadata={"format": "pt"})
    partial.replace(out)
    return len(found)


def _choice(coupling: CouplingName, kept_bits: int | None, strength: float | None) -> Choice:
    if coupling not in get_args(CouplingName):
        raise UnknownNameError("coupling for pretrained networks", coupling, get_args(CouplingName))
    if strength is not None and not (isinstance(strength, int | float) and 0 <= strength <= 1):
        raise InputError(f"strength is a number from 0 to 1. Received: {strength!r}.")
    if kept_bits is not None and (not isinstance(kept_bits, int) or isinstance(kept_bits, bool) or not 0 <= kept_bits <= 8):
        raise InputError(f"kept_bits is an integer from 0 to 8, or None for floating point. Received: {kept_bits!r}.")
    if coupling == "additive":
        return Choice("additive", None)
    if strength is not None:
        return Choice(coupling, None, float(strength))
    if kept_bits is None:
        raise InputError("In floating point a strength is needed: strength=0.1, or kept_bits from 0 to 8.")
    return Choice(coupling, kept_bits)


def _name(name: str, choice: Choice, source: Source) -> str:
    stem = Path(name).name or "converted"
    clean = "".join(letter if letter.isalnum() else "_" for letter in stem).lower()
    return clean if source.published else f"{clean}_{choice.name}"


def _comparisons(
    model: Model, original: Original, tensors: Mapping[str, Tensor], choice: Choice, batch: Any
) -> tuple[tuple[Comparison, ...], list[str]]:
    """Return how far the converted network is from the original, and why that was not looked at."""
    if original.run is None:
        return (), ["The original was not run: no library here has it."]
    try:
        network = original.run(original.description, tensors)
    except (ImportError, AttributeError):
        return (), ["The original was not run: its library is not installed (pip install transformers), or has no such class."]
    found = []
    if not choice.additive:
        kept = model.spec, model.coupling
        model.recouple(kept_bits=None, **{choice.strength_name: 0.0})
        found.append(
            compared(
                "the original and the converted network at b = 0", network, model, batch, "Due to the order of sums alone."
            )
        )
        model.spec, model.coupling = kept
    due = "Due to the coupling: it starts as another function." if choice.additive else f"Due to {_due(model)}."
    found.append(compared("the original and the converted network", network, model, batch, due))
    return tuple(found), []


def _due(model: Model) -> str:
    coupling = model.coupling
    if coupling.b == 0:
        return "the order of sums alone"
    grid = "" if coupling.kept_bits is None else ", and streams rounded to 2^-16"
    return f"b = {abs(coupling.b):g}{grid}"


def _free(folder: Path) -> Path:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder} exists and is not an empty folder. Name another (--out).")
    return folder


def _write(folder: Path, model: Model, report: ConvertReport) -> None:
    """Write everything into a folder beside, and give it its name when it is complete."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    writing = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        (writing / "spec.yaml").write_text(model.spec.to_yaml())
        save(model, writing / CONVERTED_WEIGHTS)
        report.save(writing / "report.json")
        (writing / "report.txt").write_text(f"{report}\n")
        plot_conversion(report, writing / "report.png")
        writing.chmod(0o755)
        if folder.exists():
            folder.rmdir()
        writing.rename(folder)
    finally:
        shutil.rmtree(writing, ignore_errors=True)


def _back(row: Row, tensors: list[Tensor]) -> Sequence[Tensor]:
    """Return a row's tensors as the source has them."""
    if row.how == "merged":
        return torch.split(tensors[0], [shape[0] for shape in row.source_shapes])
    if row.how == "reshaped":
        (shape,), (tensor,) = row.source_shapes, tensors
        if tensor.dim() == len(shape) == 3:  # positions, in front of which the source has rows that nothing reads
            tensor = torch.nn.functional.pad(tensor, (0, 0, shape[1] - tensor.shape[1], 0), value=1.0)
        return [tensor.reshape(shape)]
    return tensors


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value
