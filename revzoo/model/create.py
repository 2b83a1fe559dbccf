"""Create a network with weights from a model name, a spec file or a folder."""

import inspect
import logging
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from revzoo.checkpoint.files import compare_specs, load_weights, read_tensors, strip_wrappers
from revzoo.checkpoint.index import find_folder_weights, find_shipped_weights
from revzoo.errors import CheckpointError, InputError, did_you_mean, join_names
from revzoo.hub import fetch_if_on_hub
from revzoo.model.adapt import adapt_input
from revzoo.model.builder import build
from revzoo.model.model import Model, check_num_outputs
from revzoo.model.timm_methods import find_classifier
from revzoo.runtime.exact import Grid
from revzoo.runtime.lookahead import LookaheadOption
from revzoo.runtime.mode import Mode
from revzoo.spec.loading import load_spec
from revzoo.spec.names import BEST_WEIGHTS
from revzoo.spec.schema import ImageInput, Spec
from revzoo.spec.synonym import TIMM

_logger = logging.getLogger("revzoo")  # which prints warnings to stderr unless it is configured otherwise
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def create(
    source: str | Path,
    *,
    pretrained: bool = False,
    checkpoint: str | Path | None = None,
    num_outputs: int | None = None,
    overrides: Iterable[str] | None = None,
    schedule: str | Sequence[str] = Mode.INVERT,
    tiles: int | Sequence[int] = 1,
    lookahead: LookaheadOption = 0,
    exact: bool = False,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    **others: object,
) -> Model:
    """Create a reversible network. It is in training mode, like any new module.

    Args:
        source: a model name (`revzoo.list_models()`), a spec file, a folder with a spec.yaml, such as a training run's, or
            such a folder on the Hugging Face hub: `hf-hub:OWNER/NAME`, or `hf-hub:OWNER/NAME@REVISION`. The weights in a
            folder are loaded too, except on the meta device: those that `save_pretrained` or `revzoo convert` wrote, or the
            best ones of a run, which is logged. If `overrides` change the head, what the folder has no tensors for starts at
            random, which is logged as well.
        pretrained: load the weights that ship with revzoo for this model. Those in a folder are loaded anyway.
        checkpoint: file with the weights to load: safetensors, or a pickled state dict (read with `weights_only=True`).
        num_outputs: number of classes. If the weights, or without weights the spec, have another number, the last linear layer
            is replaced by a new one with random weights. None: the spec's number.
        overrides: values to replace in the spec, such as `["stages.0.depth=6"]`. Shipped weights and those of a folder are
            adapted to another `input.size` or `input.channels`: positions are interpolated, the first convolution repeated.
        schedule: one mode for all steps, "stage_inputs", or a list with one mode for each of `model.units`.
        tiles: into how many pieces every step is cut, or a list with one number for each of `model.units` (`model.tiles`).
        lookahead: how many units are recovered ahead of backward, 0 or 1 (`model.lookahead`).
        exact: round the streams to a grid, so that recovered activations are bit-identical (`revzoo.runtime.exact`).
        device: device of the parameters. On "meta" no memory is allocated. None: PyTorch's default device, which is the CPU
            unless `with torch.device(...)` or `torch.set_default_device` says otherwise.
        dtype: data type of the parameters, and so of the streams. None: float32.
        others: none is allowed; arguments of timm raise an error with what they are called here.

    Raises:
        UnknownNameError: there is no such model, or no weights ship for it.
        SpecError: the spec or the overrides have problems.
        InputError: another argument has a value that is not allowed.
        CheckpointError: the weights do not fit the model, there are none in the folder, or the hub does not have it.
        ScheduleError: the schedule does not fit the model.
    """
    if others:
        raise InputError(f"create takes no {next(iter(others))!r}.{_hint_at_argument(*next(iter(others.items())))}")
    if isinstance(overrides, str):
        raise InputError(f"overrides is a list of strings. Received: {overrides!r}. Use overrides=[{overrides!r}].")
    if dtype is not None and dtype not in _DTYPES:
        raise InputError(f"dtype is one of {', '.join(map(str, _DTYPES))}. Received: {dtype!r}. Use dtype=torch.float32.")
    if num_outputs is not None:
        check_num_outputs(num_outputs)
    target = _check_device(device)
    source = fetch_if_on_hub(source)
    spec = load_spec(source, list(overrides or ()))
    file = choose_weights(source, pretrained, checkpoint, in_folder=target.type != "meta")
    is_own = pretrained or (file is not None and file != checkpoint)
    original = find_own_spec(source, spec) if is_own and overrides else spec
    with target:
        model = build(original)
    model.to(dtype)
    if model.coupling.is_exact:
        Grid(next(model.parameters()).dtype)  # raises for a dtype without a grid
    if file is not None:
        if num_outputs is not None and not is_own:
            _adopt_outputs(model, file)
        load_weights(model, file)
    if original.input != spec.input:
        model = adapt_input(model, replace(spec, head=original.head))
        _logger.info("The weights are of images %s, and were adapted to %s.", original.input, spec.input)
    if original.head != spec.head:
        with target:
            model = _replace_head(model, spec).to(dtype)
    if num_outputs is not None and num_outputs != model.num_classes:
        model.reset_head(num_outputs)
    model.schedule = schedule
    model.tiles = tiles
    model.lookahead = lookahead
    model.exact = exact
    return model


# `Model.from_pretrained` calls it. The file of `Model` cannot import this one, which imports that one.
Model._create = staticmethod(create)


def _hint_at_argument(name: str, value: object) -> str:
    """Return what to write instead of an argument of timm's, or the nearest argument."""
    if name == "num_classes":
        return f" Use num_outputs={value!r}."
    if name in TIMM:
        return f" Use overrides=[{f'{name}={value}'!r}]."
    return did_you_mean(name, inspect.signature(create).parameters)


def choose_weights(
    source: str | Path, pretrained: bool, checkpoint: str | Path | None, *, in_folder: bool = True
) -> str | Path | None:
    """Return the file of weights that `create` loads for these arguments, or None.

    Args:
        source: as for `create`.
        pretrained: as for `create`.
        checkpoint: as for `create`.
        in_folder: whether the weights in a folder are taken where none are asked for.
    Raises:
        CheckpointError: two places are named, or the weights are missing.
        UnknownNameError: no weights ship for the model.
    """
    if pretrained and checkpoint is not None:
        raise CheckpointError("Weights come from one place. Received: pretrained=True and checkpoint. Leave one of them out.")
    if checkpoint is not None or not (in_folder or pretrained):
        return checkpoint
    file = find_folder_weights(source)
    if file is None and pretrained:
        return find_shipped_weights(str(source))
    if file is not None and file.name.startswith(BEST_WEIGHTS):  # or its index
        _logger.info("%s is the folder of a run: loading its best weights, %s; checkpoint= takes others.", source, file)
    return file


def build_for_weights(spec: Spec, file: str | Path) -> Model:
    """Return the network of a spec on the meta device, with as many classes as a file of weights has.

    Raises:
        CheckpointError: the file is missing or damaged.
    """
    with torch.device("meta"):
        model = build(spec)
    _adopt_outputs(model, file)
    return model


def _adopt_outputs(model: Model, file: str | Path) -> None:
    """Give a model as many classes as a file of weights has; the generators of CPU and CUDA stay as they are."""
    if (name := find_classifier(model.head)) is None:
        return
    weight, device = strip_wrappers(read_tensors(file)).get(f"{name}.weight"), next(model.parameters()).device
    if weight is not None and weight.ndim == 2 and len(weight) not in (0, model.num_classes):
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            model.reset_head(len(weight))


def find_own_spec(source: str | Path, spec: Spec) -> Spec:
    """Return the spec to load a source's weights with: `spec` with the source's head, or the source's own if images differ."""
    original = load_spec(source)
    images = isinstance(spec.input, ImageInput) and isinstance(original.input, ImageInput)
    if not images or spec.input == original.input:
        return replace(spec, head=original.head)
    differing = [path for path in compare_specs(original.to_yaml(), spec) if not path.startswith(("input.", "head."))]
    if differing:
        warnings.warn(f"The weights of {source} were made for another spec. Differing: {join_names(differing)}.", stacklevel=3)
    return original


def _replace_head(model: Model, spec: Spec) -> Model:
    """Return the network of a spec with another head, with the same tensors wherever it has them; log which are new."""
    other = build(spec)
    own = other.state_dict()
    common = {key: t for key, t in model.state_dict().items() if key in own and own[key].shape == t.shape}
    left = other.load_state_dict(common, strict=False).missing_keys
    other.data_config = model.data_config
    if not left:
        other.class_names = model.class_names
    else:
        _logger.warning(
            "%s has the head %s now, not %s. Initialised at random: %s.",
            spec.name, spec.head.type, model.spec.head.type, join_names(left),
        )  # fmt: skip
    return other


def _check_device(device: torch.device | str | None) -> torch.device:
    """Return the device, the default one for None, or raise InputError if torch cannot make a tensor on it."""
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, TypeError, ValueError, ImportError) as error:  # which one depends on the backend
        reason = str(error).partition("\n")[0]
        raise InputError(
            f"device is one that torch can use here, such as cpu or meta. Received: {device!r} ({reason})."
        ) from error
