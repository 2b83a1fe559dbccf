"""What a state holds in the files of torch.distributed.checkpoint, which any number of processes can read.

Every process writes the tensors, or shards of tensors, that are its own; what all have alike is written by the first. To read,
each process takes its own shards from whichever files hold them. So the files are the same for plain models, for
DistributedDataParallel and for FSDP2, and what one number of processes has written another can read.

PyTorch's `get_state_dict` is not used for optimizers: where one has no state yet, it makes a step to give it one, after which
training would not go on as if nothing had been saved.

The names are `model.KEY`, `ema.KEY` and `optimizer.PARAMETER.KEY`; `settings` is everything that is not a tensor.
"""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

from revzoo.checkpoint.slices import RowOrder, copy_whole_, find_row_orders, gather_whole, restore_rows
from revzoo.errors import CheckpointError, join_names

METADATA = ".metadata"  # says which file holds which part of which tensor
_SETTINGS = "settings"
# The names are flat already; in the settings flattening would lose what is empty.
_AS_IT_IS = {"flatten_state_dict": False, "flatten_sharded_tensors": False}


def write_tensors(folder: Path, modules: Mapping[str, nn.Module], optimizer: Optimizer, settings: dict[str, Any]) -> None:
    """Write modules and an optimizer into a folder; all processes call this together, and an error of one is raised in all.

    Args:
        folder: the folder, of a file system that all processes see.
        modules: modules by name; the parameters of "model" are those of the optimizer.
        optimizer: the optimizer.
        settings: anything else that is needed to go on.

    Raises:
        OSError, RuntimeError: the error of the process that could not write.
    """
    tensors = {f"{name}.{key}": tensor for name, module in modules.items() for key, tensor in _list_tensors(module).items()}
    own, rest = _read_optimizer(modules["model"], optimizer)
    contents = dict(restore_rows({**tensors, **own}, _find_orders(modules, {**tensors, **own})))
    writer = FileSystemWriter(folder)  # which waits until its files are on the disk
    # Of what all processes have alike but for rounding or statistics, the first one's is used in training, too.
    planner = DefaultSavePlanner(**_AS_IT_IS, dedup_save_to_lowest_rank=True)
    with _as_ordinary_errors():
        save({**contents, _SETTINGS: {**settings, "optimizer": rest}}, storage_writer=writer, planner=planner)


def list_own_files(folder: Path) -> list[Path]:
    """Return the files of a folder that this process has written."""
    rank = distributed.get_rank() if distributed.is_initialized() else 0
    return sorted(folder.glob(f"__{rank}_*"))


def read_tensors(folder: Path, modules: Mapping[str, nn.Module], optimizer: Optimizer) -> dict[str, Any]:
    """Read modules and an optimizer from a folder; all processes call this together. Return the settings.

    Args:
        folder: what `write_tensors` has written, with whatever number of processes.
        modules: as they were written, with values of their own, sharded or not.
        optimizer: an optimizer that has made no step yet.

    Raises:
        CheckpointError: the files are of another model or optimizer.
        Exception: the files are missing or damaged; their readers raise all kinds of errors.
    """
    with _as_ordinary_errors():
        saved = FileSystemReader(folder).read_metadata()
        tensors = {f"{name}.{key}": tensor for name, module in modules.items() for key, tensor in _list_tensors(module).items()}
        _require_fit(saved, tensors)
        state = _make_state(saved, modules["model"])
        orders = _find_orders(modules, {**tensors, **state})
        dealt = {path: tensor for path, tensor in {**tensors, **state}.items() if path in orders}
        ordinary = {path: torch.empty_like(tensor) for path, tensor in dealt.items()}
        contents: dict[str, Any] = {**tensors, **state, **ordinary, _SETTINGS: None}
        load(
            contents,
            storage_reader=FileSystemReader(folder),
            planner=DefaultLoadPlanner(**_AS_IT_IS),
        )
    for path, tensor in dealt.items():
        copy_whole_(tensor, gather_whole(ordinary[path]), orders[path])
    settings: dict[str, Any] = contents[_SETTINGS]
    _load_optimizer(modules["model"], optimizer, state, settings.pop("optimizer"))
    return settings


def _list_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by key, each tied one once."""
    first: dict[int, str] = {}
    tensors = module.state_dict(keep_vars=True)
    return {key: t.detach() for key, t in tensors.items() if first.setdefault(id(t), key) == key}


def _find_orders(modules: Mapping[str, nn.Module], tensors: Mapping[str, Tensor]) -> dict[str, RowOrder]:
    """Return the order of the tensors whose rows have been dealt out, by name: parameters, and state of their shape."""
    orders = {f"{name}.{key}": order for name, module in modules.items() for key, order in find_row_orders(module).items()}
    for path, tensor in tensors.items():
        parameter = f"model.{path.removeprefix('optimizer.').rpartition('.')[0]}"
        if path.startswith("optimizer.") and parameter in orders and tensor.shape == tensors[parameter].shape:
            orders[path] = orders[parameter]
    return orders


def _name_parameters(model: nn.Module, optimizer: Optimizer) -> list[str]:
    """Return the names of the optimizer's parameters, in its order, which is that of the numbers in its state dict."""
    names = {id(p): name for name, p in model.named_parameters()}
    return [names[id(p)] for group in optimizer.param_groups for p in group["params"]]


def _read_optimizer(model: nn.Module, optimizer: Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors of an optimizer's state by name, and everything else."""
    saved, names = optimizer.state_dict(), _name_parameters(model, optimizer)
    values = {(names[number], key): value for number, row in saved["state"].items() for key, value in row.items()}
    tensors = {f"optimizer.{name}.{key}": value for (name, key), value in values.items() if isinstance(value, Tensor)}
    others = {place: value for place, value in values.items() if not isinstance(value, Tensor)}
    return tensors, {"names": names, "groups": saved["param_groups"], "others": others}


def _make_state(saved: Metadata, model: nn.Module) -> dict[str, Tensor]:
    """Return tensors to read an optimizer's state into: sharded as the parameter where they have its shape, else whole."""
    parameters, state = dict(model.named_parameters()), {}
    for path, facts in saved.state_dict_metadata.items():
        if path.startswith("optimizer.") and isinstance(facts, TensorStorageMetadata):
            p = parameters[path.removeprefix("optimizer.").rpartition(".")[0]]
            like = p.detach() if facts.size == p.shape != () else torch.empty(facts.size)
            state[path] = torch.empty_like(like, dtype=facts.properties.dtype)
    return state


def _load_optimizer(model: nn.Module, optimizer: Optimizer, tensors: dict[str, Tensor], rest: dict[str, Any]) -> None:
    """Give an optimizer what `_read_optimizer` has returned of one like it."""
    names = _name_parameters(model, optimizer)
    if names != rest["names"]:
        raise CheckpointError("The optimizer had other parameters, or had them in another order.")
    numbers = {name: number for number, name in enumerate(names)}
    state: dict[int, dict[str, Any]] = {}
    for path, tensor in tensors.items():
        name, _, key = path.removeprefix("optimizer.").rpartition(".")
        state.setdefault(numbers[name], {})[key] = tensor
    for (name, key), value in rest["others"].items():
        state.setdefault(numbers[name], {})[key] = value
    optimizer.load_state_dict({"state": state, "param_groups": rest["groups"]})


def _require_fit(saved: Metadata, tensors: dict[str, Tensor]) -> None:
    """Raise CheckpointError, which lists every difference, unless the files hold these tensors and no others of a module."""
    facts = saved.state_dict_metadata
    sizes = {path: each.size for path, each in facts.items() if isinstance(each, TensorStorageMetadata)}
    own = {path: size for path, size in sizes.items() if not path.startswith("optimizer.")}
    problems = {
        "missing": [path for path in tensors if path not in own],
        "unexpected": [path for path in own if path not in tensors],
        "of another shape": [
            f"{path} {tuple(own[path])} instead of {tuple(tensor.shape)}"
            for path, tensor in tensors.items()
            if path in own and own[path] != tensor.shape
        ],
    }
    if any(problems.values()):
        rows = [f"{len(paths)} {problem}: {join_names(paths, most=3)}" for problem, paths in problems.items() if paths]
        raise CheckpointError(f"The state does not fit the model: {'; '.join(rows)}")


@contextmanager
def _as_ordinary_errors() -> Iterator[None]:
    """Raise what went wrong in any process, without PyTorch's report of it."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*assuming the intent is to (save|load) in a single process")
            yield
    except CheckpointException as report:
        raise next(iter(report.failures.values()))[0] from None
