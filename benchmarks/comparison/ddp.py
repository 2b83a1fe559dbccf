"""The rows of the matrix that need two processes: DistributedDataParallel over gloo, with each of its three settings."""

import json
import warnings
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

from comparison.method import METHODS, Method
from comparison.net import SMALL_NETS, Net
from comparison.trial import Trial, compare, describe_error, make_reference

SETTINGS: dict[str, dict[str, Any]] = {
    "DDP": {},
    "DDP with find_unused_parameters": {"find_unused_parameters": True},
    "DDP with static_graph": {"static_graph": True},
}
Verdicts = dict[str, dict[str, dict[str, str]]]  # what is wrong, by setting, method and net


def check_ddp(methods: Sequence[Method]) -> Verdicts:
    """Train every small net for two steps in two processes; return what is wrong, by setting, method and net."""
    with TemporaryDirectory() as folder:
        names = [method.name for method in methods]
        spawn(_run_rank, args=(Path(folder), names), nprocs=2)
        verdicts: Verdicts = json.loads((Path(folder) / "verdicts.json").read_text(encoding="utf-8"))
    return verdicts


def _run_rank(rank: int, folder: Path, names: Sequence[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2, timeout=timedelta(seconds=60))
    methods = [method for method in METHODS if method.name in names]
    with warnings.catch_warnings(action="ignore"):
        verdicts = {
            setting: {method.name: {net.name: _judge(rank, method, net, setting) for net in SMALL_NETS} for method in methods}
            for setting in SETTINGS
        }
    if rank == 0:
        (folder / "verdicts.json").write_text(json.dumps(verdicts), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def _judge(rank: int, method: Method, net: Net, setting: str) -> str:
    """Return what is wrong with the gradients of the second step, which are averaged over the processes."""
    try:
        trial = Trial(method, net)
        # A group of its own: what an error leaves unfinished does not meet the next network.
        parallel = DistributedDataParallel(trial.module, process_group=dist.new_group(), **SETTINGS[setting])
        for seed in (1, 3):
            parallel.zero_grad()
            outputs = parallel(*trial.make_inputs(seed + rank))
            trial.loss(trial.method.split(net, outputs)).backward()
    except Exception as error:
        return describe_error(error)
    stored = Trial(make_reference(method), net)
    for seed in (3, 4):
        stored.loss(stored(stored.make_inputs(seed))).backward()
    return compare(trial.gradients(), [None if g is None else g / 2 for g in stored.gradients()], 1e-9)
