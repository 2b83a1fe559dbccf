"""Networks divided over gloo processes train as in one process, with the collectives of plain FSDP2 and no more bytes.

This file is also the program of the processes: it forks them, and each writes what it has counted as JSON.
"""

import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

import revzoo
from revzoo.analysis import verify
from revzoo.errors import InputError, SpecError
from revzoo.sharding.mesh import count_shards, make_mesh
from revzoo.sharding.shard import list_gathered, shard_
from revzoo.training import loop, make_network
from revzoo.training.evaluate_checkpoint import evaluate_checkpoint
from revzoo.training.processes import follow_launcher
from revzoo.training.recipe import load_recipe

SECONDS = 300
SMALL = ["model.overrides=[stages.0.depth=1]"]
FALLING = ["model.overrides=[stages.0.depth=1,'block.coupling={type: momentum, kept_bits: 8}']", "coupling={kept_bits: [8, 4]}"]
# What is trained: recipe and overrides. Each case has the same result for every number of processes and every way to divide.
CASES = {
    "plain": ("digits", SMALL),
    "all at once": ("digits", [*FALLING, "train.freeze=[stem]", "optimizer.layer_decay=0.8", "train.accumulate=2"]),
}
# What is run, by name: number of processes and of nodes, the case, and how it is divided.
QUICK = {"full": (2, 1, "plain", ["train.shard=full"])}
SLOW = {
    "DDP": (4, 1, "plain", []),
    "full 4": (4, 1, "plain", ["train.shard=full"]),
    "hybrid": (4, 2, "plain", ["train.shard=hybrid"]),
    "all at once": (4, 2, "all at once", ["train.shard=hybrid", "train.offload=true"]),
}
# The names under which releases of PyTorch have the collectives of FSDP2.
COLLECTIVES = {
    "all_gather_into_tensor": "all-gather",
    "all_gather_single": "all-gather",
    "reduce_scatter_tensor": "reduce-scatter",
    "reduce_scatter_single": "reduce-scatter",
}
MODES = ["store", "selective", "recompute", "invert"]


def load(case: str, processes: int, *more: str) -> Any:
    """Return a recipe of two epochs with 3 batches of 480 images, which the processes share."""
    name, overrides = CASES[case]
    size = f"data.batch_size={480 // processes}"
    return load_recipe(name, ["train.epochs=2", "schedule.warmup_epochs=1", size, *overrides, *more])


# --- one of the processes


def count_collectives(create: Callable[..., revzoo.Model], **arguments: Any) -> dict[str, int]:
    """Return how many all-gathers and reduce-scatters a training step makes."""
    model = create(**arguments)
    shard_(model, make_mesh(dist.get_world_size(), "full"))
    counts: Counter[str] = Counter()

    def count(real: Callable[..., Any], kind: str) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            counts[kind] += 1
            return real(*args, **kwargs)

        return counted

    with pytest.MonkeyPatch.context() as patch:
        for name, kind in COLLECTIVES.items():
            if real := getattr(dist, name, None):
                patch.setattr(dist, name, count(real, kind))
        model(model.example_input(2)).sum().backward()
    return dict(counts)


def create_small(overrides: list[str] | None = None, **arguments: Any) -> revzoo.Model:
    torch.manual_seed(0)
    return revzoo.create("rev_vit_digits", overrides=["stages.0.depth=2", *(overrides or [])], **arguments)


def count_bytes() -> dict[str, int]:
    """Return bytes of this process's parameters, gradients and optimizer state, and of the most that was gathered at once."""
    model, gathered = create_small(), []
    shard_(model, make_mesh(dist.get_world_size(), "full"))
    for module in model.modules():  # in forward, and again where a step is recovered
        if isinstance(module, FSDPModule):
            module.register_forward_pre_hook(
                lambda *_: gathered.append(sum(p.nbytes for p in model.parameters() if not isinstance(p, DTensor)))
            )
    optimizer = torch.optim.AdamW(model.parameters())
    model(model.example_input(2)).sum().backward()
    optimizer.step()
    state = [t for entry in optimizer.state.values() for t in entry.values() if isinstance(t, DTensor)]
    return {
        "parameters": sum(p.to_local().nbytes for p in model.parameters()),
        "gradients": sum(p.grad.to_local().nbytes for p in model.parameters()),
        "state": sum(t.to_local().nbytes for t in state),
        "gathered": max(gathered),
    }


def fail_in_one(rank: int, folder: Path) -> dict[str, Any]:
    """Return what each process knows of what only one of them could find: a folder that cannot be made, a wrong gradient."""
    model = create_small()
    shard_(model, make_mesh(dist.get_world_size(), "full"))
    with pytest.raises(InputError) as refused:  # the others could make theirs
        model.save_pretrained(folder / "store" / "inside a file" if rank == 0 else folder / f"saved-{rank}")
    with pytest.raises(InputError, match="before it is divided. Received: parameters that are shards"):
        revzoo.plan(model, model.example_input(2), "1GiB")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verify, "_find_problems", lambda *_: ["wrong"] * rank)
        problems = verify.verify(model, model.example_input(2)).problems
    return {"refused": str(refused.value), "made": (folder / f"saved-{rank}").exists(), "problems": problems}


def work(rank: int, processes: int, folder: Path, quick: bool) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes)}
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", "0"  # not used: the group is made here
    loop.describe_memory = loop.describe_gradients = lambda run: ""  # what is only printed
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=processes)
    for name, (_, nodes, case, how) in (QUICK if quick else SLOW).items():
        os.environ["LOCAL_WORLD_SIZE"] = str(processes // nodes)
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        with pytest.MonkeyPatch.context() as patch:
            if how:  # what is divided is not made by create
                patch.delattr(make_network, "create")
            loop.train(load(case, processes, *how), folder / name)
    if quick:
        variants: dict[str, dict[str, Any]] = {mode: {"schedule": mode} for mode in MODES}
        variants |= {"exact": {"exact": True}, "lookahead": {"lookahead": 1}}
        variants["kept bits"] = {"overrides": ["block.coupling={type: momentum, kept_bits: 8}"]}
        counts = {name: count_collectives(create_small, **arguments) for name, arguments in variants.items()}
        (folder / f"{rank}.json").write_text(
            json.dumps({"collectives": counts, "bytes": count_bytes(), "failures": fail_in_one(rank, folder)})
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    from conftest import fork

    torch.set_num_threads(1)
    quick = sys.argv[2] == "quick"
    processes = 2 if quick else 4
    sys.exit(fork(processes, lambda rank: work(rank, processes, Path(sys.argv[1]), quick)))


# --- the tests


@pytest.fixture(scope="module")
def run_alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that trains a case in this process, once, and returns the folder of the run."""

    def run(case: str) -> Path:
        with pytest.MonkeyPatch.context() as patch:  # what is only printed
            patch.setattr(loop, "describe_memory", lambda run: "")
            return loop.train(load(case, 1), tmp_path_factory.mktemp("alone") / "run").folder

    return cache(run)


def read_figures(folder: Path) -> list[dict[str, float]]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: record[key] for key in ("updates", "train_loss", "loss", "top1", "top5")} for record in records]


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_divided_training_equals_that_of_one_process(name, run_all, run_alone):
    """Losses and accuracies after two epochs, for the same batches; each example counts once."""
    case = (QUICK | SLOW)[name][2]
    for divided, alone in zip(read_figures(run_all(name in QUICK) / name), read_figures(run_alone(case)), strict=True):
        assert divided == pytest.approx(alone, rel=1e-5)


def test_the_weights_are_saved_whole(run_all):
    folder = run_all(True) / "full"
    scores = evaluate_checkpoint(folder / "last.safetensors")
    assert scores.count == 355
    assert read_figures(folder)[-1] == pytest.approx(
        read_figures(folder)[-1] | {"loss": scores.loss, **scores.metrics}, rel=1e-5
    )


def test_every_mode_makes_the_collectives_of_plain_training(run_all):
    units = len(list_gathered(create_small()))
    assert units == 7  # stem, four steps, fuse and head
    for rank in range(2):
        counts = json.loads((run_all(True) / f"{rank}.json").read_text())["collectives"]
        expected = {"all-gather": 2 * units, "reduce-scatter": units}
        assert counts == dict.fromkeys([*MODES, "exact", "lookahead", "kept bits"], expected)


def test_each_process_holds_its_share_and_one_unit(run_all):
    model = create_small()
    whole = sum(p.nbytes for p in model.parameters())
    largest = max(sum(p.nbytes for p in unit.parameters()) for unit in list_gathered(model))
    held = [json.loads((run_all(True) / f"{rank}.json").read_text())["bytes"] for rank in range(2)]
    for name, total in (("parameters", whole), ("gradients", whole), ("state", 2 * whole)):
        assert sum(each[name] for each in held) == total
        odd = sum(p[0].nbytes for p in model.parameters() if len(p) % 2)  # rows that cannot be halved
        assert max(each[name] for each in held) == (total + odd * total // whole) // 2
    assert [each["gathered"] for each in held] == [largest, largest]


def test_what_one_process_finds_all_of_them_say(run_all):
    """Otherwise the others would wait for it until the limit of time."""
    for rank in range(2):
        failures = json.loads((run_all(True) / f"{rank}.json").read_text())["failures"]
        assert failures["refused"].startswith(f"No folder can be made at {run_all(True)}/store/inside a file")
        assert (failures["made"], failures["problems"]) == (False, ["wrong"])


def test_tied_parameters_are_left_to_the_root():
    model = revzoo.create("rev_roberta_mini", device="meta")
    assert model.stem not in list_gathered(model)
    assert model.head not in list_gathered(model)
    assert set(model.steps) < set(list_gathered(model))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((4, "hybrid"), "Received: 4 processes on one node. Use shard=full"),
        ((5, "hybrid", 2), "must be a multiple of 2, for 2 nodes. Received: 5 processes"),
    ],
)
def test_processes_that_do_not_fit_are_refused(arguments, message):
    with pytest.raises(InputError, match=message):
        count_shards(*arguments)
    assert count_shards(8, "hybrid", 2) == 4


def test_one_process_without_a_launcher_is_refused(tmp_path):
    with pytest.raises(SpecError, match="train.shard: found 'full' without a launcher; allowed: none, or start torchrun"):
        loop.train(load_recipe("digits", ["train.shard=full"]), tmp_path / "run")


def test_the_configuration_of_accelerate_decides(monkeypatch):
    recipe = load_recipe("digits")
    assert follow_launcher(recipe) == recipe
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    assert follow_launcher(recipe).train.shard == "full"
    with pytest.raises(SpecError, match="train.mixed_precision: found 'fp16'; allowed: bf16 or 'no' with train.shard"):
        follow_launcher(load_recipe("digits", ["train.mixed_precision=fp16"]))
    monkeypatch.setenv("FSDP_OFFLOAD_PARAMS", "true")
    assert follow_launcher(recipe).train.offload
    monkeypatch.setenv("FSDP_OFFLOAD_PARAMS", "false")
    with pytest.raises(InputError, match="fsdp_offload_params is true for this recipe. Received: false"):
        follow_launcher(load_recipe("digits", ["train.shard=full", "train.offload=true"]))
    with pytest.raises(InputError, match="Received: train.shard=hybrid"):
        follow_launcher(load_recipe("digits", ["train.shard=hybrid"]))
    monkeypatch.setenv("FSDP_ACTIVATION_CHECKPOINTING", "true")
    with pytest.raises(InputError, match="fsdp_activation_checkpointing is false for this recipe. Received: true"):
        follow_launcher(recipe)
