"""Budgets of divided networks: gloo processes train with plans, and take to the byte what was planned.

This file is also the program of the processes: it forks them, and each writes what it has counted as JSON.
"""

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState

from revzoo.data import digits  # noqa: F401  what the processes share
from revzoo.planning import budget
from revzoo.planning.plan import Plan
from revzoo.training import epochs, loop
from revzoo.training.interrupt import Interrupted, StopSignal
from revzoo.training.options import Recipe
from revzoo.training.recipe import load_recipe
from revzoo.training.run import Run

SECONDS = 600
VIT = "stem.width=8,stages.0.width=8,stages.0.depth=1,block.f.heads=2,block.drop_path.max=0.2,head.dropout=0.1"
DEEP = "stem.width=32,stages.0.width=32,stages.0.depth=9"
REVNET = ",".join(["stem.width=8", *(f"stages.{i}.width=8,stages.{i}.depth=1" for i in range(3))])
REFORMER = "stem.width=16,stages.0.width=16,stages.0.depth=1,block.f.heads=2,block.f.hashes=1,input.length=64"


class Case(NamedTuple):
    """What is trained, within which budget."""

    recipe: str
    overrides: str
    batch: int
    budget: str
    settings: tuple[str, ...] = ()

    def load(self, *more: str) -> Recipe:
        settings = ["train.epochs=2", "schedule.warmup_epochs=0", "train.shard=full", f"model.overrides=[{self.overrides}]"]
        settings += [f"data.batch_size={self.batch}", f"memory.budget={self.budget}"]
        return load_recipe(self.recipe, [*settings, *self.settings, *more])


# Every kind of loss and batch, and everything that is alive besides them.
ADDED_UP = ("train.accumulate=2", "mixup={mixup_alpha: 0.8}", "train.freeze=[stem]", "optimizer.layer_decay=0.8")
UPDATED = ("ema=null", "optimizer.foreach=true", "optimizer.weight_decay_of=all", "train.clip_grad=null")
QUICK = {"added up": Case("digits", VIT, 64, "50%", (*ADDED_UP, "memory.lookahead=1"))}
SLOW = {
    "bf16, BatchNorm, offload": Case(
        "digits_revnet", REVNET, 16, "538KiB", ("train.mixed_precision=bf16", "train.offload=true")
    ),
    "update": Case("digits", DEEP, 1, "640KiB", UPDATED),
    "bytes": Case("text_reformer", REFORMER, 32, "8900KiB"),
}
MEMORY = 4 * 690 * 1024  # of which each of two processes takes half of a half


# --- one of the processes


def count_epoch(run: Run, train: Callable[[], int]) -> tuple[int, int]:
    """Train an epoch; return the most bytes within a step, and outside of steps."""
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
    outside = [0, *(end for _, end in steps)], [*(start for start, _ in steps), len(bytes_)]
    return max(max(bytes_[start : end + 1]) for start, end in steps), max(
        max(bytes_[end:start], default=0) for end, start in zip(*outside, strict=True)
    )


def train_counted(train: Callable[[], Any], updates: int) -> tuple[int, int]:
    """Train until a signal after some updates; return what `count_epoch` does."""
    taken, train_epoch, signals = [], epochs.train_epoch, iter([0] * (updates - 1) + [signal.SIGTERM])

    def train_and_count(run: Run, *rest: Any) -> int:
        signums = []
        taken.append(count_epoch(run, lambda: signums.append(train_epoch(run, *rest))))
        return signums[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StopSignal, "poll", lambda self: next(signals))
        patch.setattr(epochs, "train_epoch", train_and_count)
        with pytest.raises(Interrupted):
            train()
    return taken[0]


def work(rank: int, processes: int, folder: Path, cases: dict[str, Case]) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes)}
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", "0"  # not used: the group is made here
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=processes)
    loop.describe_memory = loop.describe_gradients = lambda run: ""  # what is only printed
    budget._read_memory = lambda device: (MEMORY, MEMORY * (1 if rank else 2))  # the main process sees more
    for name, case in cases.items():
        os.environ["LOCAL_WORLD_SIZE"] = str(processes // 2 if name == "hybrid" else processes)
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        taken = [train_counted(partial(loop.train, case.load(), folder / name), updates=3)]
        if cases is QUICK:
            taken.append(train_counted(partial(loop.resume, folder / name), updates=1))
        (folder / f"{name}-{rank}.json").write_text(json.dumps(taken))
    dist.destroy_process_group()


if __name__ == "__main__":
    from conftest import BytesOfRank, fork

    torch.set_num_threads(1)
    processes, cases = (2, QUICK) if sys.argv[2] == "quick" else (4, SLOW)
    sys.exit(fork(processes, lambda rank: work(rank, processes, Path(sys.argv[1]), cases)))


# --- the tests


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_training_takes_what_the_plan_says(name, run_all):
    """The largest step of the first process is the plan's peak to the byte; nothing in it, or in the others, is above."""
    folder = run_all(name in QUICK)
    plan = Plan.load(folder / name / "plan.json")
    first, *others = [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in range(2 if name in QUICK else 4)]
    assert len(set(plan.schedule)) > 1
    assert plan.peak_bytes <= plan.budget_bytes
    steps, updates = zip(*first, strict=True)
    assert steps == (plan.peak_bytes,) * len(first)
    assert max(updates) <= plan.peak_bytes
    if name == "update":  # by then there is no loss divided by the batches of an update
        assert updates == (plan.min_peak_bytes - 4,)
    assert all(most <= plan.peak_bytes for taken in others for epoch in taken for most in epoch)


def test_the_smallest_budget_of_all_processes_counts(run_all):
    """One of two on a machine sees half of its memory; the plan that it begins with is that of the resumed run."""
    folder = run_all(True)
    plan = Plan.load(folder / "added up" / "plan.json")
    assert plan.budget_bytes == MEMORY // 4
    assert plan.lookahead == 0
    output = (folder / "output").read_text()
    assert output.count(f"The plan: {plan}") == 2


@pytest.mark.slow
def test_one_process_goes_on_with_a_plan_of_its_own(run_all, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(run_all(True) / "added up", folder)
    loop.resume(folder)
    plan = Plan.load(folder / "plan.json")
    assert plan.setting.batch[0].startswith("[128, ")
    assert set(plan.schedule) == {"store"}  # half of this machine's memory is enough
