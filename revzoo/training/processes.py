"""The processes of a run: how they were started, and whether they divide the network among them.

    torchrun --nproc_per_node 8 -m zoo_cli train RECIPE train.shard=full
    accelerate launch --config_file fsdp2.yaml -m zoo_cli train RECIPE

Accelerate's configuration of FSDP2 means what `train.shard=full` means: its settings go into the recipe before anything else.
"""

import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.tracking import get_available_trackers
from accelerate.utils import FullyShardedDataParallelPlugin, InitProcessGroupKwargs, broadcast_object_list, gather_object
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy

from revzoo.errors import InputError, SpecError
from revzoo.sharding.mesh import make_mesh, read_sizes
from revzoo.spec.parsing import to_plain
from revzoo.spec.tree import YamlNode
from revzoo.training.options import Recipe
from revzoo.training.recipe_check import find_contradictions


def follow_launcher(recipe: Recipe) -> Recipe:
    """Return the recipe with the settings of Accelerate's FSDP2 configuration, where the processes were started with one.

    Raises:
        InputError: a setting that has no counterpart, or that contradicts the recipe.
        SpecError: settings of the recipe that do not go with a divided network.
    """
    if os.environ.get("ACCELERATE_USE_FSDP", "").lower() != "true":
        return recipe
    plugin, train = FullyShardedDataParallelPlugin(), recipe.train  # it reads what `accelerate launch` has put there
    offload = isinstance(plugin.cpu_offload, CPUOffloadPolicy)
    for name, value, allowed in (
        ("fsdp_version", plugin.fsdp_version, 2),
        ("fsdp_reshard_after_forward", plugin.reshard_after_forward, True),
        ("fsdp_activation_checkpointing", plugin.activation_checkpointing, False),  # model.schedule is there for that
        ("fsdp_offload_params", offload, offload or train.offload),
    ):
        if value != allowed:
            raise InputError(
                f"In Accelerate's configuration, {name} is {str(allowed).lower()} for this recipe. Received: "
                f"{str(value).lower()}. Change it; model.schedule of the recipe says what is kept and what is computed again."
            )
    if train.shard == "hybrid":
        raise InputError(
            "Accelerate's configuration of FSDP means train.shard=full. Received: train.shard=hybrid. Start hybrid runs with "
            "torchrun, without a configuration."
        )
    followed = replace(recipe, train=replace(train, shard="full", offload=offload))
    if problems := list(find_contradictions(YamlNode.from_plain(to_plain(followed), recipe.file))):
        raise SpecError(problems)
    return followed


def make_accelerator(recipe: Recipe) -> Accelerator:
    """Return Accelerate's object for device, processes and the recipe's precision.

    Raises:
        SpecError: the precision is not one of this machine, or a tracker is not installed.
    """
    options = recipe.train
    if options.mixed_precision == "fp16" and not torch.accelerator.is_available():
        raise recipe.error("train.mixed_precision", "'fp16' without a GPU", "bf16 or 'no'")
    if missing := [name for name in options.track if name not in map(str, get_available_trackers())]:
        allowed = f"trackers whose package is installed: python -m pip install {' '.join(missing).replace('_', '-')}"
        raise recipe.error("train.track", str(list(options.track)), allowed)  # which Accelerate would leave out
    group: dict[str, Any] = {}
    if options.timeout_seconds is not None:
        group["timeout"] = timedelta(seconds=options.timeout_seconds)
    if options.offload and torch.cuda.is_available():  # what lies on the host is added up there
        group["backend"] = "cuda:nccl,cpu:gloo"
    form_group_anew(**group)
    handlers = [InitProcessGroupKwargs(**group)] if group else []
    return open_accelerator(
        options.mixed_precision,
        gradient_accumulation_steps=options.accumulate,
        kwargs_handlers=handlers,
        log_with=list(options.track) or None,
        project_dir=".",  # until there is a folder; TensorBoard's tracker wants one
    )


def open_accelerator(precision: str, **arguments: Any) -> Accelerator:
    """Return Accelerate's object. Without a GPU it has to be told to look for other processes on the CPU.

    A process may train several runs, but Accelerate refuses a precision other than the first: its state is then reset.
    """
    if AcceleratorState._shared_state.get("_mixed_precision", precision) != precision:
        AcceleratorState._reset_state()  # as Transformers' TrainingArguments does
    return Accelerator(mixed_precision=precision, cpu=not torch.accelerator.is_available(), **arguments)


def form_group_anew(timeout: timedelta | None = None, backend: str | None = None) -> None:
    """Form the group of the processes that torchrun has started again; at their first start, leave it to Accelerate.

    torchrun keeps its store, with the addresses of the processes that have ended, which the new ones must not read. With
    several machines, whose counts of restarts may differ, its TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 makes a new store instead.

    Args:
        timeout: how long a process waits for another; None: PyTorch's choice.
        backend: of the group; None: "nccl" on GPUs, else "gloo".
    """
    start, is_shared = count_restarts(), os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if not (start and is_shared and os.environ["GROUP_WORLD_SIZE"] == "1") or distributed.is_initialized():
        return
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = distributed.TCPStore(address, port, is_master=False)  # type: ignore[attr-defined]
    on_gpu = torch.cuda.is_available() and os.environ.get("ACCELERATE_USE_CPU", "false").lower() not in ("1", "true", "yes")
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    distributed.init_process_group(
        backend or ("nccl" if on_gpu else "gloo"),
        store=distributed.PrefixStore(f"start-{start}", store),  # type: ignore[attr-defined]
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timeout,
    )


def count_restarts() -> int:
    """Return how often torchrun has started this process again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def make_run_mesh(recipe: Recipe, accelerator: Accelerator, *, begun: bool) -> DeviceMesh | None:
    """Return the mesh of processes over which the recipe divides the network; None if it does not.

    Args:
        recipe: the recipe.
        accelerator: Accelerate's object for it.
        begun: one process may go on alone with a run whose network was divided, and holds all of it.

    Raises:
        SpecError: a new run has only one process, without a launcher.
        InputError: the processes cannot be arranged like this.
    """
    options, processes = recipe.train, accelerator.num_processes
    is_alone = not distributed.is_initialized()
    if options.shard == "none" or (is_alone and begun):
        return None
    if is_alone:
        command = f"torchrun --nproc_per_node N -m zoo_cli train ... train.shard={options.shard}"
        raise recipe.error("train.shard", f"{options.shard!r} without a launcher", f"none, or start {command}")
    nodes = max(1, processes // int(os.environ.get("LOCAL_WORLD_SIZE", processes)))
    return make_mesh(processes, options.shard, nodes, accelerator.device.type)


def describe_division(mesh: DeviceMesh) -> str:
    """Return in words over which processes a network is divided."""
    sizes = read_sizes(mesh)
    repeated = f", repeated on {sizes['replicate']} nodes" if "replicate" in sizes else ""
    return f"divided over {sizes['shard']} processes{repeated}"


T = TypeVar("T")


def call_on_main(accelerator: Accelerator, function: Callable[[], T]) -> T:
    """Call a function in the main process and return its result, or raise its error, in every process.

    The function must not wait for the other processes, which wait for its end here. If only the main process raised its error,
    the others would wait for good.
    """
    result: T
    [(result, error)] = broadcast_object_list([_call(function) if accelerator.is_main_process else None])
    if error is not None:
        raise error
    return result


def call_on_all(function: Callable[[], T]) -> T:
    """Call a function in every process and return its result; an error of any of them is raised in every process.

    The function must not wait for the other processes.
    """
    result: T
    result, own = _call(function)
    errors = [error for error in (own, *gather_object([own])) if error is not None]
    if errors:
        raise errors[0]
    return result


def _call(function: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return function(), None
    except Exception as error:
        return None, _make_portable(error)


def _make_portable(error: Exception) -> Exception:
    """Return the error, or its text as an error where it cannot be sent to other processes."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # whatever an error raises that was not made for it
        return RuntimeError(f"{type(error).__name__}: {error}").with_traceback(error.__traceback__)
    return error
