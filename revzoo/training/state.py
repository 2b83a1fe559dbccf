"""Save and load the state of a run: weights, their running average, the optimizer's state and the progress."""

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from timm.utils import distribute_bn
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.optim import Optimizer

from revzoo.errors import CheckpointError, join_names
from revzoo.training.divergence import check_weights
from revzoo.training.processes import call_on_main
from revzoo.training.setup import Run
from revzoo.training.state_writer import AS_IT_IS, StateWriter, as_ordinary_errors


def save_state(run: Run) -> None:
    """Save everything needed to resume from here; until that is complete, the previous state stays the newest.

    It may be complete only later, when `run.upload` says so.

    Raises:
        DivergedError: there are infinities or NaN in the weights; nothing is saved.
        RevzooError: this state, or the one before it, could not be written.
    """
    run.upload.wait()
    share_statistics(run)  # a state has room for one process's
    check_weights(run)
    writing, scaler = run.folder.states / "writing", run.accelerator.scaler
    settings = {"scaler": None if scaler is None else scaler.state_dict()}
    run.progress.processes = run.accelerator.num_processes
    progress = replace(run.progress)  # as it is now, whatever training does meanwhile

    def publish(checksums: dict[str, str]) -> None:
        run.origin.save(writing)
        run.folder.publish_state(writing, progress, run.recipe.train.keep_states, checksums)

    call_on_main(run.accelerator, lambda: shutil.rmtree(writing, ignore_errors=True))
    contents = list_contents(_list_modules(run), run.optimizer.optimizer, settings)
    run.upload.start(contents, StateWriter(writing, publish))


def load_state(run: Run) -> None:
    """Load weights, their running average and the optimizer's state from the newest state of the run's folder.

    However many processes have saved it, each takes what it needs.

    Raises:
        CheckpointError: a file is missing, damaged, or of another model.
    """
    state = run.folder.find_state()
    try:
        settings = read_tensors(state, _list_modules(run), run.optimizer.optimizer)
    except CheckpointError as error:
        raise run.folder.explain_damage(state, error) from error
    except Exception as error:  # damaged files make the readers raise all kinds of exceptions
        raise run.folder.explain_damage(state / METADATA, f"{type(error).__name__}: {error}") from error
    if run.accelerator.scaler is not None and settings["scaler"] is not None:
        run.accelerator.scaler.load_state_dict(settings["scaler"])


def _list_modules(run: Run) -> dict[str, nn.Module]:
    return {"model": run.model} if run.ema is None else {"model": run.model, "ema": run.ema.module}


METADATA = ".metadata"  # says which file holds which part of which tensor
_SETTINGS = "settings"


def list_contents(modules: Mapping[str, nn.Module], optimizer: Optimizer, settings: dict[str, Any]) -> dict[str, Any]:
    """Return what is to be written, by name: tensors, which go on to change in training, and everything else.

    Args:
        modules: modules by name; the parameters of "model" are those of the optimizer.
        optimizer: the optimizer.
        settings: anything else that is needed to go on.
    """
    tensors = _list_tensors(modules)
    own, rest = _read_optimizer(modules["model"], optimizer)
    return {**tensors, **own, _SETTINGS: {**settings, "optimizer": rest}}


def read_tensors(folder: Path, modules: Mapping[str, nn.Module], optimizer: Optimizer) -> dict[str, Any]:
    """Read modules and an optimizer from a folder; all processes call this together. Return the settings.

    Args:
        folder: where the contents were written, by whatever number of processes.
        modules: as they were written, with values of their own, sharded or not.
        optimizer: an optimizer that has made no step yet.

    Raises:
        CheckpointError: the files are of another model or optimizer.
        Exception: the files are missing or damaged; their readers raise all kinds of errors.
    """
    with as_ordinary_errors():
        saved = FileSystemReader(folder).read_metadata()
        tensors = _list_tensors(modules)
        _require_fit(saved, tensors)
        state = _make_state(saved, modules["model"])
        contents: dict[str, Any] = {**tensors, **state, _SETTINGS: None}
        load(contents, storage_reader=FileSystemReader(folder), planner=DefaultLoadPlanner(**AS_IT_IS))
    settings: dict[str, Any] = contents[_SETTINGS]
    _load_optimizer(modules["model"], optimizer, state, settings.pop("optimizer"))
    return settings


def _list_tensors(modules: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """Return parameters and buffers of all modules by name, each tied one once."""
    first: dict[int, str] = {}
    tensors = {f"{name}.{key}": t for name, module in modules.items() for key, t in module.state_dict(keep_vars=True).items()}
    return {name: t.detach() for name, t in tensors.items() if first.setdefault(id(t), name) == name}


def _split_name(name: str) -> tuple[str, str]:
    """Return the parameter and the key of a tensor of an optimizer's state, whose name is `optimizer.PARAMETER.KEY`."""
    parameter, _, key = name.removeprefix("optimizer.").rpartition(".")
    return parameter, key


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
            p = parameters[_split_name(path)[0]]
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
        name, key = _split_name(path)
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


def share_statistics(run: Run) -> None:
    """Give all processes the same statistics; all processes call this together, before they evaluate or save.

    With DistributedDataParallel they are the first one's, which the next forward takes anyway. Processes that divide a network
    take the mean of theirs. Statistics are linear in those of the batches, so that the mean does not depend, but for rounding,
    on how often it is taken.
    """
    processes, is_divided = run.accelerator.num_processes, run.mesh is not None
    if processes > 1:
        for model in dict.fromkeys([run.model, run.evaluated]) if is_divided else [run.evaluated]:
            distribute_bn(model, processes, reduce=is_divided)
