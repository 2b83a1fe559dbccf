"""Budgets of divided networks: gloo processes train with plans, and take to the byte what was planned.

This file is also the program of the processes: it forks them, and each writes what it has counted as JSON.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState

import revzoo
from revzoo.planning.plan import Plan
from revzoo.runtime.live_bytes import LiveBytes
from revzoo.training import loop
from revzoo.training.budget import apply_plan
from revzoo.training.interrupt import Interrupted, StopSignal
from revzoo.training.recipe import load_recipe
from revzoo.training.setup import Run, build_run

SECONDS = 300
VIT = "stem.width=8,stages.0.width=8,stages.0.depth=1,block.f.heads=2,block.drop_path.max=0.2,head.dropout=0.1"
REVNET = ",".join(["stem.width=8", *(f"stages.{i}.width=8,stages.{i}.depth=1" for i in range(3))])
FAST = ["data.batch_size=64", "train.epochs=2", "schedule.warmup_epochs=0", "train.shard=full"]
# Every kind of loss and batch, and everything that is alive beside them.
QUICK = {
    "averaged": ("digits", [*FAST, f"model.overrides=[{VIT}]"]),
    "added up": (
        "digits",
        [*FAST, f"model.overrides=[{VIT}]", "train.accumulate=2", "mixup={mixup_alpha: 0.8}", "ema=null"]
        + ["train.freeze=[stem]", "optimizer.layer_decay=0.8"],
    ),
}
SLOW = {
    "bf16 and BatchNorm": (
        "digits_revnet",
        [*FAST, f"model.overrides=[{REVNET}]", "train.mixed_precision=bf16", "data.batch_size=16"],
    ),
    "bf16": ("digits", [*FAST, f"model.overrides=[{VIT}]", "train.mixed_precision=bf16"]),
}


class BytesOfRank(LiveBytes):
    """Live bytes without the copy that gloo makes of what it reduces; it is seen where gloo splits it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.split.Tensor:
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)


# --- one of the processes


def count_epoch(run: Run, train: Callable[[], int]) -> tuple[int, int]:
    """Train an epoch; return the most bytes within a step, and in all of it."""
    live, steps = BytesOfRank(), []
    live.watch([run.model.parameters(), run.model.buffers()])
    live.watch([] if run.ema is None else [run.ema.module.parameters(), run.ema.module.buffers()])
    live.watch(run.optimizer.state_dict()["state"].values())
    examples = live.watch(t for t in vars(run.data._examples).values() if isinstance(t, torch.Tensor))
    backward = run.accelerator.backward

    def to_the_end(loss: torch.Tensor) -> None:
        backward(loss)
        steps[-1].append(live.now())

    hook = run.model.register_forward_pre_hook(lambda *_: steps.append([live.now()]), prepend=True)
    with pytest.MonkeyPatch.context() as patch, live:
        patch.setattr(run.accelerator, "backward", to_the_end)
        train()
    hook.remove()
    bytes_ = list(accumulate(0 if storage in examples else change for storage, change in live.log))
    return max(max(bytes_[start : end + 1]) for start, end in steps), max(bytes_)


def train_counted(name: str, settings: list[str], folder: Path) -> list[tuple[int, int]]:
    """Train for three updates; return what `count_epoch` does."""
    epochs, train_epoch, signals = [], loop._train_epoch, iter([0, 0, signal.SIGTERM])

    def train_and_count(run: Run, *rest: Any) -> int:
        signum = 0

        def train() -> None:
            nonlocal signum
            signum = train_epoch(run, *rest)

        epochs.append(count_epoch(run, train))
        return signum

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StopSignal, "poll", lambda self: next(signals))
        patch.setattr(loop, "_train_epoch", train_and_count)
        with pytest.raises(Interrupted):
            loop.train(load_recipe(name, settings), folder)
    return epochs


def run_case(name: str, settings: list[str], folder: Path) -> dict[str, Any]:
    """Plan without a limit, then train with half of what could be saved."""
    wide = apply_plan(build_run(load_recipe(name, [*settings, "memory.budget=1TiB"]), folder / "wide", resumed=False))
    assert wide is not None
    budget = (wide.min_peak_bytes + wide.no_recompute_peak_bytes) // 2
    [taken] = train_counted(name, [*settings, f"memory.budget={budget}"], folder)
    return {"budget": budget, "taken": taken}


def work(rank: int, processes: int, folder: Path, cases: dict[str, Any]) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes)}
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", "0"  # not used: the group is made here
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=processes)
    for name, (recipe, settings) in cases.items():
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        results = run_case(recipe, settings, folder / name)
        (folder / f"{name}-{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


def fork(folder: Path, processes: int, cases: dict[str, Any]) -> int:
    """Run the processes; return 0 if all of them have ended well. They share what this one has imported."""
    children = []
    for rank in range(processes):
        if not (child := os.fork()):
            try:
                work(rank, processes, folder, cases)
            except BaseException as error:
                import traceback; traceback.print_exc()
                print(f"process {rank}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
                os._exit(1)
            os._exit(0)
        children.append(child)
    return max(os.waitpid(child, 0)[1] for child in children) and 1


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(fork(Path(sys.argv[1]), 2, QUICK if sys.argv[2] == "quick" else SLOW))
