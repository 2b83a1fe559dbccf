"""Plans for many ranks: their bytes and collectives are those of two gloo processes that train with them.

This file is also the program of the two processes. They run all cases in one process group and write their results as JSON.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from timm.optim import create_optimizer_v2
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode

import revzoo
from revzoo.planning.ranks.division import Division
from revzoo.planning.ranks.rank_plan import RankPlan, plan_ranks
from revzoo.sharding.mesh import make_mesh
from revzoo.sharding.shard import shard_

NAMES = {"_allgather_base_": "all-gather", "_reduce_scatter_base_": "reduce-scatter"}
SECONDS = 300  # what the two processes are given
RANKS, BATCH = 2, 8


# Models: overrides, the budget to plan with, and units whose parameters are frozen.
CASES = {
    "rev_vit_digits": (["stages.0.depth=2"], "2200KiB", ("stem", "stages.0.blocks.0.g", "stages.0.blocks.1.f")),
    "revnet_digits": (["stages.1.depth=1", "stages.2.depth=1"], "4MiB", ()),
}


class Collectives(TorchDispatchMode):
    """Count the calls of `torch.distributed`."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.calls[func._opname] = self.calls.get(func._opname, 0) + 1
        return func(*args, **(kwargs or {}))


def create(name: str, device: str) -> revzoo.Model:
    torch.manual_seed(0)
    overrides, _, frozen = CASES[name]
    model = revzoo.create(name, device=device, overrides=overrides)
    for unit in frozen:
        model.get_submodule(unit).requires_grad_(False)
    return model


def plan(name: str, mesh: DeviceMesh) -> RankPlan:
    """Plan in the main process, while the other one waits for the plan."""
    model = create(name, "meta")
    optimizer, plans = create_optimizer_v2(model, "adamw"), [None]
    if distributed.get_rank() == 0:
        batch, division = model.example_input(BATCH), Division(RANKS)
        plans = [plan_ranks(model, batch, CASES[name][1], division, optimizer=optimizer, mesh=mesh)[0]]
    distributed.broadcast_object_list(plans)
    return plans[0]


def run(name: str) -> dict[str, Any]:
    """Plan, then make a step and an update in both processes."""
    mesh = make_mesh(RANKS, "full")
    result = plan(name, mesh)
    model = create(name, "cpu")
    batch = model.example_input(BATCH)
    shard_(model, mesh)
    result.plan.apply(model)
    optimizer = create_optimizer_v2(model, "adamw")
    with Collectives() as collectives, BytesOfRank() as live:
        weights, buffers = live.watch(model.parameters()), live.watch(model.buffers())
        live.watch(batch)
        model(batch).sum().backward()
        gradients = live.watch(p.grad for p in model.parameters())
        peak = live.peak()
        optimizer.step()
        state = live.watch(optimizer.state.values())
    held = result.held
    return {
        "planned": [result.plan.peak_bytes, held.weights, held.buffers, held.gradients, held.optimizer.state],
        "run": [peak + live.size(state), *map(live.size, (weights, buffers, gradients, state))],
        "budget": result.plan.budget_bytes,
        "planned calls": {kind: each.calls for kind, each in result.collectives.items()},
        "calls": {NAMES[kind]: calls for kind, calls in collectives.calls.items()},
    }


def work(rank: int, folder: Path) -> None:
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    results = {name: run(name) for name in CASES}
    (folder / f"{rank}.json").write_text(json.dumps(results))
    distributed.destroy_process_group()


if __name__ == "__main__":
    from conftest import BytesOfRank, fork

    torch.set_num_threads(1)
    sys.exit(fork(RANKS, lambda rank: work(rank, Path(sys.argv[1]))))


# --- the tests


@pytest.fixture(scope="module")
def results(run_all: Callable[[bool], Path]) -> list[dict[str, Any]]:
    """Return what each of the two processes reported."""
    folder = run_all(False)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_rank_takes_and_sends_what_was_planned(name, results):
    """To the byte in the main process, and no more in the other; the collectives of the step that was run."""
    first, second = (result[name] for result in results)
    assert first["planned"] == first["run"]
    assert first["planned"][0] <= first["budget"]
    assert all(run <= planned for run, planned in zip(second["run"], second["planned"], strict=True))
    assert first["planned calls"] == first["calls"]
    assert first["calls"] == second["calls"]
