"""Make a reversible network from a pretrained ordinary one: the same layers on two streams, with the same tensors.

    original -> source.make_spec -> Spec -> build                   the network
    tensors  -> source.canonicalise, source.map_tensors -> assign   its weights

A source (`sources/`) knows one family of networks; this file has what all conversions share. `export.py` is the way back.
"""

import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from revzoo.analysis.likeness import on_grid_of_training, warn_of_another_function
from revzoo.bounds import MOST_KEPT_BITS, Sign
from revzoo.checkpoint.facts import IMAGE_FACTS
from revzoo.checkpoint.folder import save_folder
from revzoo.checkpoint.writing import write_tensors
from revzoo.conversion.assign import Assignment, assign
from revzoo.conversion.choice import B_ARGUMENTS, CouplingChoice, CouplingName
from revzoo.conversion.compare import ComparedBatch, compare, make_compared_batch, measure_largest_state, run_original, zero_b
from revzoo.conversion.mapping import TensorMapping
from revzoo.conversion.original import Original, find_original
from revzoo.conversion.report import Comparison, ConvertReport
from revzoo.conversion.sources import find_candidates, find_source
from revzoo.conversion.sources.base import IN_PLACE, Source
from revzoo.conversion.sources.timm_base import TimmSource
from revzoo.errors import ConversionError, InputError, RevzooError, UnknownNameError, join_names
from revzoo.model.builder import build
from revzoo.model.model import Model, check_num_outputs
from revzoo.runtime.mode import Mode
from revzoo.spec.edit import with_outputs
from revzoo.spec.loading import parse_spec
from revzoo.spec.names import TOKENIZER, UNUSED_WEIGHTS
from revzoo.spec.schema import ImageInput, Spec, TextInput

_ROUNDING = 1e-4  # largest relative difference of logits that the order of sums may explain; 1e-6 is usual
_UNLIKE = (
    "MORE than the order of sums explains: the original does something that the converted network does not, such as hooks, a "
    "changed forward, or padding before texts."
)
_SAME_COSINE, _NEAR_COSINE = 0.9999, 0.9  # of the logits
_SAME_ANSWERS = 0.995
_KEEP_NEARER = (
    "Keep more bits (kept_bits), or take a smaller m or beta; if states are too small for the grid of kept bits, as those of "
    "fresh class tokens are, convert trained weights, or in floating point: kept_bits=None, m=0.1"
)
_ROOM = 4  # the grid has room for states this many times as large as on the examples


def convert(
    source: str | Path | nn.Module,
    weights: str | Path | None = None,
    *,
    coupling: CouplingName = "momentum",
    kept_bits: int | None = 8,
    sign: Sign = "fixed",
    m: float | None = None,
    beta: float | None = None,
    out: str | Path | None = None,
    strict: bool = True,
    num_outputs: int | None = None,
    batch: Any = None,
) -> ConvertReport:
    """Make a pretrained network reversible.

    Args:
        source: timm:NAME; hf:OWNER/NAME of the hub, or a folder with a Transformers config.json; the name or spec file of a
            reversible model (for published checkpoints of it); or a module of timm or Transformers. "timm:" may be left out.
        weights: a safetensors, .pth or .bin file, the index of a sharded checkpoint, a checkpoint of TensorFlow by the name
            before its suffixes (model.ckpt-600000), or a folder with one of these; None: the weights of the module or folder,
            or the hub's, which are fetched unless they are in its cache.
        coupling: "momentum", "dual_residual" or "additive".
        kept_bits: s from 0 to 15: b = 2^-s on a grid, and the bits that a step loses are kept, so that it is inverted exactly.
            None: floating point, with b given by `m` or `beta`. Not used where one of these is given.
        sign: "random", with momentum and kept bits: b or -b in training, drawn for each example and step, and 0 in evaluation,
            where the network is the original's function itself. Take kept_bits=1.
        m: coefficient of momentum in floating point, from 0 to below 1. With 0 the network is the original's function itself,
            which cannot be inverted.
        beta: the same for dual_residual.
        out: folder to write, new or empty: spec.yaml, model.safetensors, report.json, report.txt.
        strict: refuse missing and extra tensors; if False, missing ones are initialised at random, and extra ones
            are dropped.
        num_outputs: number of classes of the head; what the file lacks is initialised at random. A text encoder
            gets a classifier of texts, unless it is one of tokens. None: the original's own head.
        batch: examples on which both networks are compared; None: random ones.
    Returns: the reversible network in eval mode (`.model`), and a report of what was done.
    Raises:
        ConversionError: no network has this name, it cannot be converted, or the tensors do not match.
        CheckpointError: the weights cannot be read.
        InputError: another argument has a value that is not allowed.
    """
    choice = _check_coupling(coupling, kept_bits, sign, {"m": m, "beta": beta})
    if num_outputs is not None:
        check_num_outputs(num_outputs)
    folder = None if out is None else _check_folder(out)
    from_file = find_original(source, weights, lambda original: _check_architecture(original, choice))
    source_family = find_source(from_file)
    if source_family.published:
        choice = CouplingChoice("additive", None)
    original, spec, mappings, notes = _read_original(from_file, source_family, choice)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)  # not torch.manual_seed, which would seed the accelerators as well
        model = build(spec).eval()
        assignment = assign(model, mappings, source_family, original, strict, new_head=num_outputs is not None)
        model.load_state_dict(assignment.values, strict=False)
        dtypes = {dtype for row in assignment.rows for dtype in row.original_dtypes}
        if cast := sorted(dtypes & {"float16", "bfloat16", "float64"}):
            notes.append(f"Tensors of {join_names(cast)} became float32.")
        examples = make_compared_batch(model, batch)
        notes += _coarsen_grid(model, examples)
        comparisons, reasons = _compare_networks(model, original, assignment, choice, examples)
        if num_outputs is not None:
            model, assignment = _attach_head(model, from_file, original, source_family, choice, num_outputs)
            fresh = join_names([key for row in assignment.rows if row.action == "initialised" for key in row.ours])
            reasons.append(f"The head {model.spec.head.type} has {num_outputs} outputs. Initialised at random: {fresh}.")
    if comparisons and not choice.is_additive:
        warn_of_another_function(original.name, comparisons[-1].cosine, _KEEP_NEARER)
    model.schedule = Mode.INVERT
    model.data_config = _read_data_config(original.description, spec) | _find_tokenizer(from_file.folder, spec)
    report = ConvertReport(
        original=original.name,
        kind=source_family.name,
        coupling={"type": spec.coupling.type, **model.spec.coupling.arguments},
        rows=assignment.rows,
        comparisons=comparisons,
        notes=(*notes, *reasons),
        expect=_describe_expectation(model, comparisons, assignment, source_family.published),
        model=model,
    )
    if folder is not None:
        _write(folder, model, report, assignment.unused)
    return report


def _check_coupling(
    coupling: CouplingName, kept_bits: int | None, sign: Sign, sizes: Mapping[str, float | None]
) -> CouplingChoice:
    """Return the checked CouplingChoice; raise an error that names the wrong argument.

    Args:
        sizes: the arguments m and beta.
    """
    if coupling not in get_args(CouplingName):
        raise UnknownNameError("coupling for pretrained networks", coupling, get_args(CouplingName))
    argument = B_ARGUMENTS.get(coupling)
    for name, size in sizes.items():
        if size is not None and name != argument:
            remedy = "Leave it out" if argument is None else f"Use {argument}={size!r} instead"
            raise InputError(f"The coupling {coupling} has no {name}. Received: {name}={size!r}. {remedy}.")
        if size is not None and (isinstance(size, bool) or not isinstance(size, int | float) or not 0 <= size < 1):
            raise InputError(f"{name} is a number from 0 to below 1. Received: {size!r}.")
    if kept_bits is not None and (type(kept_bits) is not int or not 0 <= kept_bits <= MOST_KEPT_BITS):
        raise InputError(
            f"kept_bits is an integer from 0 to {MOST_KEPT_BITS}, or None for floating point. Received: {kept_bits!r}."
        )
    if sign not in get_args(Sign):
        raise UnknownNameError("sign", sign, get_args(Sign))
    if sign == "random" and (argument != "m" or kept_bits is None or sizes["m"] is not None):
        raise InputError(
            f"A random sign is one of momentum with kept bits. Received: coupling={coupling!r}, kept_bits={kept_bits}, "
            f"m={sizes['m']}. Use coupling='momentum', kept_bits=1 without m."
        )
    if argument is None:
        return CouplingChoice(coupling, None)
    size = sizes[argument]
    if size is not None:
        return CouplingChoice(coupling, None, float(size))
    if kept_bits is None:
        raise InputError(
            f"In floating point {coupling} needs {argument}. Received: kept_bits=None. Use for example {argument}=0.1, or "
            f"kept_bits from 0 to {MOST_KEPT_BITS}."
        )
    return CouplingChoice(coupling, kept_bits, sign=sign)


def _check_architecture(original: Original, choice: CouplingChoice) -> None:
    """Raise ConversionError where the description alone says that a network cannot be converted."""
    first, *_ = find_candidates(original)
    if isinstance(first, TimmSource):  # others need the tensors, too
        first.make_spec(original.description, choice)


def _read_original(
    original: Original, source_family: Source, choice: CouplingChoice
) -> tuple[Original, Spec, Sequence[TensorMapping], list[str]]:
    """Return the original with a complete description and the mappings' keys, the converted network's spec, mappings, notes."""
    try:
        description = source_family.complete(original.description, original.tensors)
        settings, mappings = source_family.make_spec(description, choice), source_family.map_tensors(description)
        tensors, notes = source_family.canonicalise(description, original.tensors)
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        if isinstance(error, RevzooError):
            raise
        raise ConversionError(
            f"{original.name} has parts that a {source_family.name} does not have, or lacks some "
            f"({type(error).__name__}: {error}). {IN_PLACE}"
        ) from error
    spec = parse_spec({"name": _make_name(original.name, choice, source_family), **settings}, original.name)
    return replace(original, description=description, tensors=tensors), spec, mappings, notes


def _attach_head(
    model: Model, from_file: Original, original: Original, source_family: Source, choice: CouplingChoice, num_outputs: int
) -> tuple[Model, Assignment]:
    """Return the converted network with a classifier of this many outputs, and where every tensor of the file went now.

    Args:
        model: the network with the original's own head, which is compared with the original.
        from_file: the original with its keys as they are in the file.
        original: the same, completed, with the keys that the mappings use.
    """
    own = {key for mapping in source_family.map_tensors(original.description) for key in mapping.theirs}
    description = source_family.classify(original.description, num_outputs)
    headed, spec, mappings, _ = _read_original(replace(from_file, description=description), source_family, choice)
    spec = replace(with_outputs(spec, num_outputs), block=model.spec.block)
    other = build(spec).eval()
    assignment = assign(other, mappings, source_family, headed, strict=False, new_head=True, replaced=own)
    other.load_state_dict({key: t for key, t in model.state_dict().items() if not key.startswith("head.")}, strict=False)
    other.load_state_dict(assignment.values, strict=False)
    return other, assignment


def _read_data_config(description: Any, spec: Spec) -> dict[str, Any]:
    """Return how timm prepares images for the original; nothing for others, or for other channels."""
    config = getattr(description, "pretrained_cfg", None) or {}
    if not isinstance(spec.input, ImageInput) or len(config.get("mean", ())) != spec.input.channels:
        return {}
    return {key: config[key] for key in IMAGE_FACTS if config.get(key)}


def _find_tokenizer(folder: Path | None, spec: Spec) -> dict[str, Any]:
    """Return the tokenizer next to the weights of a model for texts, if there is one in Hugging Face's format."""
    if folder is None or not isinstance(spec.input, TextInput) or not (folder / TOKENIZER).is_file():
        return {}
    return {"tokenizer": str((folder / TOKENIZER).absolute())}


def _make_name(name: str, choice: CouplingChoice, source: Source) -> str:
    stem = Path(name).name or "converted"
    clean = "".join(letter if letter.isalnum() else "_" for letter in stem).lower()
    return clean if source.published else f"{clean}_{choice.name}"


def _compare_networks(
    model: Model, original: Original, assignment: Assignment, choice: CouplingChoice, examples: ComparedBatch
) -> tuple[tuple[Comparison, ...], list[str]]:
    """Compare the converted network with the original, first at b = 0; return a note instead if the original cannot be run."""
    if any(row.action == "initialised" for row in assignment.rows):
        return (), ["The original was not run: tensors are missing, and those initialised at random have to be trained."]
    if original.build is None:
        return (), ["The original was not run: no library here has it, or it has no values."]
    try:
        network = original.build(original.description, {**original.tensors, **assignment.interpolated})
        outputs = run_original(network, examples)
    except ImportError:
        return (), ["The original was not run: its library is not installed (pip install transformers)."]
    except Exception as error:  # of another library's code
        raise ConversionError(
            f"{original.name}, which the converted network is compared with, cannot be copied and run on the batch itself "
            f"({type(error).__name__}: {error}). Mend it, or give a batch that it takes: batch=... {IN_PLACE}"
        ) from error
    comparisons = list[Comparison]()
    if not choice.is_additive:
        what = "the original and the converted network at b = 0"
        with zero_b(model):
            same = compare(what, outputs, model, examples, "Due to the order of sums alone.")
        comparisons.append(same if same.largest_difference <= _ROUNDING else replace(same, note=_UNLIKE))
    cause = "the coupling: until fine-tuned it computes another function" if choice.is_additive else _explain_difference(model)
    what = f"the original and the converted network{'' if choice.sign == 'fixed' else ' on the grid of training'}"
    with on_grid_of_training([model]):
        comparisons.append(compare(what, outputs, model, examples, f"Due to {cause}."))
    return tuple(comparisons), []


def _describe_expectation(model: Model, comparisons: Sequence[Comparison], assignment: Assignment, published: bool) -> str:
    """Return what to expect before fine-tuning, according to the comparison if there is one."""
    if published and assignment.interpolated:
        return (
            "The published network at another resolution: its positions were interpolated, so fine-tune it. A spec of the "
            f"file's own resolution keeps its function: base: {model.spec.name} with input.size=[H,W], as a .yaml file."
        )
    if published:
        later = ", once what is missing is trained" if any(row.action == "initialised" for row in assignment.rows) else ""
        return f"The published network: the same function with other keys{later}."
    if model.coupling.b == 0:
        return "The original itself, which cannot be inverted: train it in another mode, or with a coupling that moves."
    if model.coupling.in_evaluation.b == 0:
        return "In evaluation it is the original itself, and stays an ordinary network; signs are drawn in training alone."
    if not comparisons:
        return "What to expect before fine-tuning was not measured."
    last = comparisons[-1]
    if last.cosine >= _SAME_COSINE and last.agreement >= _SAME_ANSWERS:
        return "Expect the original's answers before fine-tuning."
    if last.cosine >= _NEAR_COSINE:
        return "Expect answers near the original's before fine-tuning, and fine-tuning to close the gap."
    return "Before fine-tuning the outputs are useless: the function differs from the original's. Only the weights carry over."


def _coarsen_grid(model: Model, examples: ComparedBatch) -> list[str]:
    """Make the grid of the states coarser if they would leave it; return a note if that was done."""
    if not model.coupling.is_exact:
        return []
    largest = measure_largest_state(model, examples)
    bits = max(4, min(16, 24 - math.ceil(math.log2(max(largest, 1e-9) * _ROOM))))  # states stay below 2^(24 - bits)
    if bits == 16:
        return []
    model.set_coupling(fraction_bits=bits)
    return [f"States reach {largest:.3g} in magnitude, so the grid is 2^-{bits} instead of 2^-16."]


def _explain_difference(model: Model) -> str:
    coupling = model.coupling
    if coupling.b == 0:
        return "the order of sums alone"
    rounding = [f"streams rounded to 2^-{coupling.fraction_bits or 16}"] if coupling.is_exact else []
    size = [f"b = {abs(coupling.b):g}"] if coupling.in_evaluation is coupling else []
    return ", and ".join(size + rounding)


def _check_folder(out: str | Path) -> Path:
    """Return the folder if it can be written and is new or empty, or raise InputError."""
    try:
        folder = Path(out).resolve()
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent):
            taken = folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"No folder can be made at {out} ({error}). Name another (--out).") from error
    if folder == Path.cwd():
        raise InputError(f"The current folder cannot be replaced by the new one. Received: {out}. Name another (--out).")
    if taken:
        raise InputError(f"{out} exists and is not an empty folder. Name another (--out).")
    return folder


def _write(folder: Path, model: Model, report: ConvertReport, unused: Mapping[str, Tensor]) -> None:
    """Write everything into a temporary folder next to `folder`, and rename it when it is complete."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as temporary:
            writing = Path(temporary) / folder.name  # colleagues may read it, unlike the temporary folder
            save_folder(model, writing)
            if unused:
                write_tensors(writing / UNUSED_WEIGHTS, {key: tensor.contiguous() for key, tensor in unused.items()}, {})
            report.save(writing / "report.json")
            (writing / "report.txt").write_text(f"{report}\n", encoding="utf-8")
            if folder.exists():
                folder.rmdir()
            writing.rename(folder)
    except (OSError, SafetensorError) as error:  # safetensors has its own error for a full disk
        raise InputError(
            f"{folder} cannot be written ({error}); nothing of it is left. Is the disk full? Make room or name another (--out)."
        ) from error
