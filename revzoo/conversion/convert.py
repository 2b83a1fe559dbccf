"""From a pretrained ordinary network to a reversible one: the same layers with two streams, and every tensor in its place.

    original -> source.spec -> Spec -> build        what is built
    tensors  -> source.canonical, source.entries    what goes where (`assign.py`)

A source (`sources.py`) knows one family; here is what they have in common. The way back is in `export.py`.
"""

import math
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor, nn

from revzoo.checkpoint.files import save_weights
from revzoo.conversion.assign import assigned
from revzoo.conversion.compare import compared, largest_state, without_past
from revzoo.conversion.original import Original, find_original
from revzoo.conversion.report import Comparison, ConvertReport
from revzoo.conversion.sources import source_of
from revzoo.conversion.sources.base import Choice, CouplingName, Source
from revzoo.display.figures.conversion import plot_conversion
from revzoo.errors import ConversionError, InputError, RevzooError, UnknownNameError, listing
from revzoo.model.builder import build
from revzoo.model.network import Model
from revzoo.spec.loading import parse_spec
from revzoo.spec.names import CONVERTED_WEIGHTS

_ROUNDING = 1e-4  # of logits, relative, at most: 1e-6 is usual
_UNLIKE = (
    "MORE than the order of sums explains: the original does something that the converted network does not, such as hooks, a "
    "changed forward, or padding in front of texts."
)
_SAME, _NEAR = 0.9999, 0.9  # cosines of logits
_SAME_ANSWERS = 0.995
_ROOM = 4  # how many times larger states may become than they are on the examples


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
        strength: m or beta in floating point, from 0 to below 1, instead of kept_bits; 0 is the source's function itself, which
            cannot be inverted.
        out: folder to write, new or empty: spec.yaml, model.safetensors, report.json, report.txt, report.png.
        partial: go on with missing or extra tensors: missing ones begin fresh, extra ones are dropped.
        batch: examples to compare both networks on; None: random ones.
    Returns: what was done, and the reversible network in eval mode (`.model`).
    Raises:
        ConversionError: nothing is called so, the network has something that cannot be expressed, or the tensors are not its.
        CheckpointError: weights that cannot be read.
        InputError: another argument is not what it must be.
    """
    choice = _choice(coupling, kept_bits, strength)
    folder = None if out is None else _free(out)
    original = find_original(source, weights)
    found = source_of(original)
    if found.published:
        choice = Choice("additive", None)
    try:
        description = found.completed(original.description, original.tensors)
        mapping, entries = found.spec(description, choice), found.entries(description)
        tensors, notes = found.canonical(description, original.tensors)
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        if isinstance(error, RevzooError):
            raise
        raise ConversionError(
            f"{original.name} is described by something that no {found.name} has ({type(error).__name__}: {error})."
        ) from error
    original = replace(original, description=description)
    spec = parse_spec({"name": _name(original.name, choice, found), **mapping}, original.name)
    with torch.device("meta"):
        shapes = build(spec)
    rows, values, fitted = assigned(shapes, entries, found, tensors, original, partial)
    if cast := sorted({dtype for row in rows for dtype in row.source_dtypes} & {"float16", "bfloat16", "float64"}):
        notes.append(f"Tensors of {listing(cast)} became float32.")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build(spec).eval()
        with torch.no_grad():
            model.load_state_dict(values, strict=False)
        notes += _suited_grid(model, batch)
        if any(row.how == "initialised" for row in rows):
            comparisons = tuple[Comparison, ...]()
            notes.append("The original was not run: tensors are missing, and what begins fresh has to be trained.")
        else:
            comparisons, more = _comparisons(model, original, {**tensors, **fitted}, choice, batch)
            notes += more
    model.schedule = "invert"
    coupled = {"type": spec.coupling.type, **model.spec.coupling.arguments}
    expect = _expectation(model, comparisons, found.published)
    report = ConvertReport(original.name, found.name, coupled, rows, comparisons, tuple(notes), expect, model)
    if folder is not None:
        _write(folder, model, report)
    return report


def _choice(coupling: CouplingName, kept_bits: int | None, strength: float | None) -> Choice:
    if coupling not in get_args(CouplingName):
        raise UnknownNameError("coupling for pretrained networks", coupling, get_args(CouplingName))
    if strength is not None and (
        coupling == "additive" or isinstance(strength, bool) or not (isinstance(strength, int | float) and 0 <= strength < 1)
    ):
        raise InputError(
            f"strength is a number from 0 to below 1, of momentum or dual_residual. Received: {strength!r} for {coupling}."
        )
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
        return (), ["The original was not run: no library here has it, or it has no values."]
    try:
        network = original.run(original.description, tensors)
    except ImportError:
        return (), ["The original was not run: its library is not installed (pip install transformers)."]
    found = []
    if not choice.additive:
        what = "the original and the converted network at b = 0"
        with without_past(model):
            same = compared(what, network, model, batch, "Due to the order of sums alone.")
        found.append(same if same.largest_difference <= _ROUNDING else replace(same, note=_UNLIKE))
    due = "Due to the coupling: it starts as another function." if choice.additive else f"Due to {_due(model)}."
    found.append(compared("the original and the converted network", network, model, batch, due))
    return tuple(found), []


def _expectation(model: Model, comparisons: Sequence[Comparison], published: bool) -> str:
    """Return what to expect before fine-tuning, as measured where it was."""
    if published:
        return "The published network, unchanged in meaning."
    if model.coupling.b == 0:
        return "The original itself, which cannot be inverted: train it in another mode, or with a coupling that moves."
    if not comparisons:
        return "What to expect before fine-tuning was not measured."
    found = comparisons[-1]
    if found.cosine >= _SAME and found.agreement >= _SAME_ANSWERS:
        return "Expect the original's answers before fine-tuning."
    if found.cosine >= _NEAR:
        return "Expect answers near the original's before fine-tuning, and fine-tuning to close the gap."
    return "Expect useless answers before fine-tuning: the function is another one, and the weights are a start, no more."


def _suited_grid(model: Model, batch: Any) -> list[str]:
    """Make the grid coarser where states would leave it, and say so."""
    if not model.coupling.is_exact:
        return []
    largest = largest_state(model, batch)
    room = max(4, min(16, 24 - math.ceil(math.log2(max(largest, 1e-9) * _ROOM))))
    if room == 16:
        return []
    model.set_coupling(fraction_bits=room)
    return [f"States reach {largest:.3g} in magnitude, so the grid is 2^-{room} instead of 2^-16."]


def _due(model: Model) -> str:
    coupling = model.coupling
    if coupling.b == 0:
        return "the order of sums alone"
    grid = "" if not coupling.is_exact else f", and streams rounded to 2^-{coupling.fraction_bits or 16}"
    return f"b = {abs(coupling.b):g}{grid}"


def _free(out: str | Path) -> Path:
    """Return a folder that can be written, or raise InputError."""
    try:
        folder = Path(out).resolve()
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent):
            taken = folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"No folder can be made at {out} ({error}). Name another (--out).") from error
    if folder == Path.cwd():
        raise InputError("A complete folder is moved into place, which the current one cannot be. Name another (--out).")
    if taken:
        raise InputError(f"{out} exists and is not an empty folder. Name another (--out).")
    return folder


def _write(folder: Path, model: Model, report: ConvertReport) -> None:
    """Write everything into a folder beside, and give it its name when it is complete."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    writing = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        (writing / "spec.yaml").write_text(model.spec.to_yaml())
        save_weights(model, model.spec, writing / CONVERTED_WEIGHTS)
        report.save(writing / "report.json")
        (writing / "report.txt").write_text(f"{report}\n")
        plot_conversion(report, writing / "report.png")
        writing.chmod(0o755)
        if folder.exists():
            folder.rmdir()
        writing.rename(folder)
    finally:
        shutil.rmtree(writing, ignore_errors=True)
