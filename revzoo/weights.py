"""Weights on disk: safetensors with the spec inside, the index of trained demo weights, and `create`.

A checkpoint either fits the model key by key and shape by shape, or nothing of it is loaded.
"""

import hashlib
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from yaml import YAMLError

from revzoo.builder import build
from revzoo.errors import CheckpointError, InputError, UnknownNameError, listing
from revzoo.model import Model, checked_outputs
from revzoo.runtime.exact import Grid
from revzoo.spec.loading import load_spec
from revzoo.spec.names import CONVERTED_WEIGHTS, data_root, model_files
from revzoo.spec.parsing import plain
from revzoo.spec.tree import join

_WRAPPERS = ("module.", "_orig_mod.")  # what DistributedDataParallel and torch.compile put in front of every key
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_STATEMENTS = ("name", "sources", "expect", "twin", "block.f", "block.g")  # what a spec's digest leaves out


@dataclass(frozen=True)
class Entry:
    """One row of the weights index.

    Args:
        file: name in the weights folder.
        sha256: of the file, in hex.
        digest: of the spec the weights were trained for.
        metric: name and value of what `revzoo eval --pretrained` repeats, for example {"top1": 98.9} [%].
        command: what trained them.
    """

    file: str
    sha256: str
    digest: str
    metric: Mapping[str, float]
    command: str


def create(
    source: str | Path,
    *,
    pretrained: bool = False,
    checkpoint: str | Path | None = None,
    num_outputs: int | None = None,
    overrides: Iterable[str] | None = None,
    schedule: str | Sequence[str] = "invert",
    exact: bool = False,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Model:
    """Return a reversible network, in training mode like any new module.

    Args:
        source: a model name (`revzoo.list_models()`), a spec file, or a folder with spec.yaml (such as a run's). One that
            `revzoo convert` wrote brings its weights, which are loaded except on the meta device.
        pretrained: load the weights that ship with revzoo for this name.
        checkpoint: load this file instead: safetensors, or a pickled state dict (read with `weights_only`).
        num_outputs: number of classes; where it differs from the spec's, the head starts fresh after loading.
        overrides: dot lists laid over the spec, such as `["stages.0.depth=6"]`.
        schedule: a mode name for all steps, or one mode for each of `model.units`.
        exact: keep the streams on a grid, so that recovered activations are bit-identical (`revzoo.runtime.exact`).
        device: where parameters are made; "meta" allocates none.
        dtype: of the parameters, and so of the streams; float32 unless given.

    Raises:
        UnknownNameError: no such model, or no shipped weights for it.
        SpecError: the spec or the overrides have problems.
        InputError: another argument is not what it must be.
        CheckpointError: the weights do not fit.
        ScheduleError: the schedule does not fit the model.
    """
    if pretrained and checkpoint is not None:
        raise CheckpointError("Weights come from one place. Received: pretrained=True and checkpoint. Leave one of them out.")
    if isinstance(overrides, str):
        raise InputError(f"overrides is a list of texts. Received: {overrides!r}. Use overrides=[{overrides!r}].")
    if dtype is not None and dtype not in _DTYPES:
        raise InputError(f"dtype is one of {', '.join(map(str, _DTYPES))}. Received: {dtype!r}. Use dtype=torch.float32.")
    if num_outputs is not None:
        checked_outputs(num_outputs)
    home = _checked_device("cpu" if device is None else device)
    spec = load_spec(source, list(overrides or ()))
    file = shipped_weights(str(source)) if pretrained else checkpoint
    if file is None and home.type != "meta":
        file = converted_weights(source)
    with home:
        model = build(spec)
    model.to(dtype)
    if model.coupling.is_exact:
        Grid(next(model.parameters()).dtype)  # refuses a dtype that has none
    if file is not None:
        load(model, file)
    if num_outputs is not None and num_outputs != model.num_outputs:
        model.reset_head(num_outputs)
    model.schedule = schedule
    model.exact = exact
    return model


def converted_weights(source: str | Path) -> Path | None:
    """Return the weights beside the spec of a folder that `revzoo convert` wrote, or None for any other source.

    Raises:
        CheckpointError: they are missing.
    """
    folder = Path(source)
    file = folder / CONVERTED_WEIGHTS
    if str(source) in model_files() or not (folder / "spec.yaml").is_file():
        return None
    if (folder / "report.json").is_file() and not file.is_file():
        raise CheckpointError(f"{folder} was written by revzoo convert, but its {CONVERTED_WEIGHTS} is missing. Convert again.")
    return file if file.is_file() else None


def _checked_device(device: torch.device | str) -> torch.device:
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, TypeError, ValueError, ImportError) as error:  # torch has one for each backend
        reason = str(error).partition("\n")[0]
        raise InputError(
            f"device is one that torch can use here, such as cpu or meta. Received: {device!r} ({reason})."
        ) from error


def save(model: Model, path: str | Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write the model's state dict as safetensors, complete or not at all, with its spec in the metadata.

    Args:
        metadata: further strings to keep with the weights, for example a metric.
    """
    path = Path(path)
    shared = _shared(model)
    tensors = {key: t.detach().cpu().contiguous() for key, t in model.state_dict().items() if key not in shared}
    facts = {"format": "pt", "revzoo.spec": model.spec.to_yaml(), "revzoo.digest": model.spec.digest, **(metadata or {})}
    partial = path.with_name(path.name + ".partial")
    save_file(tensors, partial, metadata=facts)
    partial.replace(path)


def load(model: Model, path: str | Path) -> None:
    """Load a state dict into a model whose keys and shapes it matches exactly.

    Warns where the file holds the digest of another spec, and names what differs: heads or a coupling have no tensors.
    Prefixes that wrappers put in front of every key (`module.`, `_orig_mod.`) are taken off.

    Raises:
        CheckpointError: no such file, damaged, not a state dict, or of another model: every missing, unexpected and
            misshapen key, every integer in place of a number, and every copy of a tied tensor that is none, is listed with
            counts. The model is then unchanged.
    """
    path = Path(path)
    found, metadata = _contents(path)
    tensors = without_wrappers(found)
    own, shared = model.state_dict(), _shared(model)
    untied = [
        key for key, first in shared.items() if {key, first} <= tensors.keys() and not _same(tensors[key], tensors[first])
    ]
    tensors |= {key: tensors[first] for key, first in shared.items() if first in tensors}
    problems = {
        "missing": [key for key in own if key not in tensors],
        "unexpected": [key for key in tensors if key not in own],
        "of another shape": [
            f"{key} {tuple(tensors[key].shape)} instead of {tuple(own[key].shape)}"
            for key in own
            if key in tensors and tensors[key].shape != own[key].shape
        ],
        "of another kind": [
            f"{key} {tensors[key].dtype} instead of {own[key].dtype}"
            for key in own
            if key in tensors and tensors[key].is_floating_point() != own[key].is_floating_point()
        ],
        "of other values": [f"{key}, which is {shared[key]} in this model" for key in untied],
    }
    if any(problems.values()):
        rows = [f"\n  {len(keys)} {what}: {listing(keys, most=1000)}" for what, keys in problems.items() if keys]
        raise CheckpointError(
            f"{path} does not fit {model.spec.name}, which has {len(own)} tensors; nothing was loaded.{''.join(rows)}\n"
            "Create the model it was saved from (a run's folder holds its spec.yaml), or pass the same overrides."
        )
    if metadata.get("revzoo.digest", model.spec.digest) != model.spec.digest:
        differing = listing(_differences(metadata.get("revzoo.spec", ""), model))
        warnings.warn(f"{path} fits {model.spec.name}, but was saved from another spec. Differing: {differing}.", stacklevel=2)
    on_meta = any(tensor.is_meta for tensor in own.values())
    model.load_state_dict(tensors, assign=on_meta)
    if on_meta:  # every key was assigned a parameter of its own
        for key, first in shared.items():
            owner, _, name = key.rpartition(".")
            setattr(model.get_submodule(owner), name, model.get_parameter(first))
        for module in model.modules():  # tables that no file holds
            for key, tensor in getattr(module, "constants", dict)().items():
                owner, _, name = key.rpartition(".")
                setattr(module.get_submodule(owner), name, tensor)


def _same(left: Tensor, right: Tensor) -> bool:
    return left.shape == right.shape and left.dtype == right.dtype and torch.equal(left, right)


def _shared(model: Model) -> dict[str, str]:
    """Return, for every key whose tensor an earlier key has as well (a tied embedding), that key."""
    first: dict[int, str] = {}
    tensors = model.state_dict(keep_vars=True)
    return {key: first[id(t)] for key, t in tensors.items() if first.setdefault(id(t), key) != key}


def read(path: str | Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file or of a pickled state dict, on the CPU.

    Raises:
        CheckpointError: no such file, damaged, or a pickle that holds anything but tensors.
    """
    return _contents(Path(path))[0]


def _contents(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return tensors and metadata; what is no safetensors file, whatever its name, is read as a pickle."""
    if not path.is_file():
        raise CheckpointError(f"No weights file at {path}.")
    with suppress(SafetensorError), safe_open(path, "pt") as file:
        return dict(_items(file)), dict(file.metadata() or {})
    try:
        with path.open("rb") as stream:  # of a path, torch would believe the suffix
            found = torch.load(stream, map_location="cpu", weights_only=True)
    except Exception as error:  # the reader answers damaged bytes with whatever it stumbles over, KeyError included
        raise CheckpointError(
            f"{path} cannot be read: it is truncated, not a weights file, or a pickle that holds more than tensors, which is "
            f"never executed. Received: {type(error).__name__}. Save it again as safetensors."
        ) from error
    for wrapper in ("state_dict", "model", "model_state", "state_dict_ema", "model_ema", "module", "net", "params"):
        if isinstance(found, dict) and isinstance(found.get(wrapper), dict):
            found = found[wrapper]
    if not isinstance(found, dict) or not all(isinstance(k, str) and isinstance(t, Tensor) for k, t in found.items()):
        raise CheckpointError(f"{path} holds no state dict (names to tensors). Received: {type(found).__name__}.")
    return found, {}


def _differences(spec: str, model: Model) -> list[str]:
    """Return the dotted paths at which a spec's text differs from the model's spec."""
    try:
        theirs = dict(_leaves(OmegaConf.to_container(OmegaConf.create(spec))))
    except (OmegaConfBaseException, YAMLError):
        return []
    ours = dict(_leaves(plain(model.spec)))
    paths = [path for path in {**ours, **theirs} if (path in ours, ours.get(path)) != (path in theirs, theirs.get(path))]
    return [path for path in paths if not path.startswith(_STATEMENTS)]


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every scalar of nested mappings and lists, with its dotted path."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if items is None:
        yield path, value
    else:
        for key, item in items:
            yield from _leaves(item, join(path, key))


def _items(file: Any) -> Iterator[tuple[str, Tensor]]:
    for key in file.keys():  # noqa: SIM118 - an open safetensors file is no mapping
        yield key, file.get_tensor(key)


def read_metadata(path: str | Path) -> dict[str, str]:
    """Return what `save` wrote beside the tensors of a safetensors file."""
    with safe_open(path, "pt") as file:
        return dict(file.metadata() or {})


def index() -> dict[str, Entry]:
    """Return the shipped weights by model name."""
    path = data_root() / "weights" / "index.yaml"
    rows = OmegaConf.to_container(OmegaConf.load(path)) if path.is_file() else {}
    assert isinstance(rows, dict)
    return {str(name): Entry(**row) for name, row in rows.items()}


def shipped_weights(name: str) -> Path:
    """Return the file of a model's shipped weights, its checksum verified.

    Raises:
        UnknownNameError: none ship for this model.
        CheckpointError: the file is missing or not the one the index names.
    """
    rows = index()
    if name not in rows:
        raise UnknownNameError("shipped weights", name, rows)
    path = data_root() / "weights" / rows[name].file
    if not path.is_file():
        raise CheckpointError(f"The weights index names {path}, which is missing. Install revzoo again.")
    if hashlib.sha256(path.read_bytes()).hexdigest() != rows[name].sha256:
        raise CheckpointError(f"{path} is not the file of the weights index (its sha256 differs). Install revzoo again.")
    return path


def without_wrappers(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors without what wrappers (DistributedDataParallel, torch.compile) put in front of every key."""
    for prefix in _WRAPPERS * 2:  # either may be outermost
        if tensors and all(key.startswith(prefix) for key in tensors):
            tensors = {key.removeprefix(prefix): tensor for key, tensor in tensors.items()}
    return tensors
