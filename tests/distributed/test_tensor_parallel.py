"""Networks whose layers are divided over gloo processes train as in one process, and files and states hold whole tensors.

This file is also the program of the processes: it forks them, and each writes what it has seen as JSON.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor
from torch.distributed.tensor.debug import CommDebugMode

import revzoo
from revzoo.checkpoint.files import save_weights
from revzoo.checkpoint.slices import RowOrder, find_row_orders, gather_whole, get_own_part
from revzoo.errors import InputError
from revzoo.sharding.create import create_sharded
from revzoo.sharding.mesh import make_mesh
from revzoo.sharding.shard import shard_
from revzoo.sharding.tensor_parallel import choose_parts
from revzoo.training import epochs, loop
from revzoo.training.divided_update import clip_gradients_, updates_divided
from revzoo.training.evaluation import evaluate_checkpoint
from revzoo.training.interrupt import Interrupted, StopSignal
from revzoo.training.planned_step import WholeStep
from revzoo.training.recipe import load_recipe
from revzoo.training.state import list_contents, read_tensors
from revzoo.training.state_writer import StateWriter, write

SECONDS = 500
ONE_STEP = "stages.0.depth=1"
# The networks that are compared: every part that has a plan, without dropout, whose masks would be others.
FAMILIES = {
    "rev_vit_digits": [ONE_STEP, "block.f.layer_scale=true"],
    "rev_swin_digits": [ONE_STEP, "stages.0.f.heads=4"],
    "rev_mvit_digits": [ONE_STEP, "stages.1.f.relative_position=true"],
    "rev_bert_mini": [
        ONE_STEP,
        "block.f.attention_dropout=0",
        *(f"{part}.dropout=0" for part in ("stem", "block.f", "block.g", "head")),
    ],
    "reformer_mini": [ONE_STEP, "block.f.dropout=0", "block.g.chunks=2"],
    "reformer_mini_full": [ONE_STEP, "block.f.dropout=0"],
}
QUICK = ["rev_vit_digits", "rev_swin_digits", "rev_mvit_digits"]
SLOW = [name for name in FAMILIES if name not in QUICK[1:]]
MODES = ["store", "selective", "recompute", "invert"]
CLIPPED = 0.01
RECIPE = ["train.epochs=2", "schedule.warmup_epochs=1", "model.overrides=[stages.0.depth=1]", "train.clip_grad=0.5"]
RECIPE += ["ema={decay: 0.9}", "optimizer.layer_decay=0.8", "mixup={mixup_alpha: 0.8, cutmix_alpha: 1.0}"]
SHARED = ["train.shard=full", "train.tensor_parallel=2"]
# By number of processes: updates after which a training is stopped, and with which changes it has gone on.
CHANGES = {4: [(1, SHARED)], 2: [(1, ["train.tensor_parallel=1"]), (3, ["train.tensor_parallel=2"])], 1: [(0, [])]}


def create(name: str, **arguments: Any) -> revzoo.Model:
    torch.manual_seed(3)
    return revzoo.create(name, overrides=FAMILIES[name], **arguments)


def run_step(model: revzoo.Model, batch: Tensor, seed: int = 7) -> Tensor:
    torch.manual_seed(seed)  # of rotations and dropout
    output: Tensor = model.train()(batch)
    output.square().mean().backward()
    return output


def make_batch(model: revzoo.Model) -> Tensor:
    torch.manual_seed(5)
    return model.example_input(4)


def load(shares: int, *more: str) -> Any:
    return load_recipe("digits", [*RECIPE, f"data.batch_size={480 // shares}", *more])


# --- one of the processes


def divide(name: str, **arguments: Any) -> revzoo.Model:
    torch.manual_seed(3)
    mesh = make_mesh(dist.get_world_size(), "full", 2)
    overrides = arguments.pop("overrides", FAMILIES[name])
    return create_sharded(name, lambda model: shard_(model, mesh), overrides=overrides, **arguments)


def gather(model: revzoo.Model, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    orders = find_row_orders(model)
    return {key: gather_whole(tensor, orders.get(key)) for key, tensor in tensors.items()}


def compare(name: str) -> dict[str, Any]:
    """Compare values, outputs, and gradients before and after clipping, with those of one process."""
    alone, divided = create(name), divide(name)
    batch = make_batch(alone)
    own = batch.chunk(dist.get_world_size() // 2)[dist.get_rank() // 2]
    expected, values = alone.state_dict(), gather(divided, divided.state_dict())
    whole, output = run_step(alone, batch), run_step(divided, own)
    whole = whole.chunk(len(batch) // len(own))[dist.get_rank() // 2]
    errors = [compare_gradients(alone, divided)]
    torch.nn.utils.clip_grad_norm_(alone.parameters(), CLIPPED)
    clip_gradients_(divided.parameters(), CLIPPED)
    return {
        "values": list(values) == list(expected) and all(torch.equal(values[key], t) for key, t in expected.items()),
        "output": float((output - whole).norm() / whole.norm()),
        "gradients": max(*errors, compare_gradients(alone, divided, floor=1e-2 * CLIPPED)),
        "share": sum(get_own_part(p).numel() for p in divided.parameters()) / sum(p.numel() for p in alone.parameters()),
    }


def compare_gradients(alone: revzoo.Model, divided: revzoo.Model, floor: float = 1e-2) -> float:
    gradients = gather(divided, {key: p.grad for key, p in divided.named_parameters()})
    return max(float((gradients[key] - p.grad).norm() / p.grad.norm().clamp(floor)) for key, p in alone.named_parameters())


def count_all_reduces(schedule: str) -> int:
    model = divide("rev_vit_digits", schedule=schedule)
    with CommDebugMode() as counted:
        run_step(model, make_batch(model))
    return counted.get_comm_counts()[torch.ops.c10d_functional.all_reduce]


def draw_own_numbers() -> dict[str, Any]:
    """Train with dropout inside the divided layers: do second runs repeat it, and do the processes agree afterwards?"""
    overrides = [ONE_STEP, "block.f.attention_dropout=0.5"]
    gradients, numbers = [], []
    for schedule in ("store", "invert"):
        model = divide("rev_bert_mini", overrides=overrides, schedule=schedule)
        run_step(model, make_batch(model))
        numbers.append(torch.rand(()).item())
        gradients.append([get_own_part(p.grad) for p in model.parameters()])
    same = all(torch.allclose(one, other, rtol=1e-3, atol=1e-6) for one, other in zip(*gradients, strict=True))
    return {"same": same, "next": numbers}


def save_and_load(folder: Path) -> dict[str, bool]:
    """Save weights and a state; read weights that one process has written."""
    model = divide("rev_vit_digits")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run_step(model, make_batch(model))
    optimizer.step()
    save_weights(model, folder / "weights.safetensors")
    contents = list_contents({"model": model}, optimizer, {})
    write(contents, StateWriter(folder / "state", lambda checksums: None))
    alone = create("rev_vit_digits", checkpoint=folder / "weights.safetensors")
    if dist.get_rank() == 0:
        save_weights(alone, folder / "alone.safetensors")
    dist.barrier()
    again = divide("rev_vit_digits", checkpoint=folder / "alone.safetensors")
    pairs = zip(again.parameters(), model.parameters(), strict=True)
    read = all(torch.equal(get_own_part(p), get_own_part(q)) for p, q in pairs)
    fresh = divide("rev_vit_digits")
    other = torch.optim.AdamW(fresh.parameters(), lr=1e-2)
    read_tensors(folder / "state", {"model": fresh}, other)
    for each, update in ((model, optimizer), (fresh, other)):
        update.zero_grad()
        run_step(each, make_batch(each))
        update.step()
    rows = zip(model.parameters(), fresh.parameters(), strict=True)
    return {"weights": read, "state": all(torch.equal(get_own_part(p), get_own_part(q)) for p, q in rows)}


def try_optimizers() -> dict[str, bool]:
    mesh, model = make_mesh(2, "full", 2), torch.nn.Linear(2, 2)
    optimizers = {
        "adamw": torch.optim.AdamW(model.parameters(), foreach=True),
        "adafactor": torch.optim.Adafactor(model.parameters()),
    }
    return {name: updates_divided(optimizer, mesh) for name, optimizer in optimizers.items()}


@contextmanager
def world(rank: int, processes: int, folder: Path) -> Iterator[bool]:
    """Yield whether this process is one of the first so many, which form a group inside the block."""
    if processes == 1:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            os.environ.pop(name, None)
    elif rank < processes:
        size = str(processes)
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # not used: the group is made here
        dist.init_process_group("gloo", init_method=f"file://{folder}", rank=rank, world_size=processes)
    yield rank < processes
    if dist.is_initialized():
        dist.destroy_process_group()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def stop_after(updates: int) -> Callable[[StopSignal], int]:
    """Return what asks for a signal, once after every update: there is one after so many; 0: none."""
    signals = iter([*[0] * (updates - 1), 15] if updates else [])
    return lambda stop: next(signals, 0)


def train_in_parts(processes: int, folder: Path) -> None:
    """Train with 4 and with 2 processes; and begin with 4, go on with 2, and end alone."""
    WholeStep.measure_modes = lambda step: ({}, None)
    loop.describe_gradients = lambda run: ""
    epochs.plot_curves = lambda records, path: path.write_bytes(b"")
    if processes > 1:
        loop.train(load(processes // 2, *SHARED), folder / f"whole-{processes}")
    poll = StopSignal.poll
    for updates, changes in CHANGES[processes]:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        StopSignal.poll = stop_after(updates)
        with suppress(Interrupted):
            loop.train(load(2, *changes), folder / "cut") if processes == 4 else loop.resume(folder / "cut", changes)
    StopSignal.poll = poll


def work(rank: int, folder: Path, quick: bool) -> None:
    results: dict[str, Any] = {}
    for processes in (2,) if quick else (4, 2, 1):
        with world(rank, processes, folder / f"store-{processes}") as is_one:
            if is_one and processes == (2 if quick else 4):
                results["families"] = {name: compare(name) for name in (QUICK if quick else SLOW)}
            if is_one and quick:
                results["all-reduces"] = {mode: count_all_reduces(mode) for mode in MODES}
                results |= {"numbers": draw_own_numbers(), "saved": save_and_load(folder), "optimizers": try_optimizers()}
            elif is_one:
                train_in_parts(processes, folder)
    (folder / f"{rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    from conftest import fork

    torch.set_num_threads(1)
    quick = sys.argv[2] == "quick"
    sys.exit(fork(2 if quick else 4, lambda rank: work(rank, Path(sys.argv[1]), quick)))


# --- the tests


def read_reports(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(file.read_text()) for file in sorted(folder.glob("?.json"))]


@pytest.fixture(params=[0, 1])
def report(run_all, request):
    return read_reports(run_all(True))[request.param]


@pytest.mark.parametrize("name", QUICK)
def test_values_outputs_and_gradients_are_those_of_one_process(name, report):
    assert_same(report["families"][name])
    assert 0.5 < report["families"][name]["share"] < 0.9  # of what is divided, half


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_the_same_where_the_network_is_divided_as_well(name, run_all):
    for each in read_reports(run_all(False)):
        assert_same(each["families"][name])
        assert 0.25 < each["families"][name]["share"] < 0.5


def assert_same(comparison: dict[str, Any]) -> None:
    assert comparison["values"]
    assert comparison["output"] < 1e-5
    assert comparison["gradients"] < 1e-5


def test_each_branch_adds_up_once_in_every_run_and_once_in_backward(report):
    """There are two; the second run of the last branch ends before that, unless its result is needed to invert the step."""
    assert report["all-reduces"] == {"store": 4, "selective": 5, "recompute": 5, "invert": 6}


def test_dropout_between_divided_layers_is_repeated_and_leaves_the_processes_alike(report, run_all):
    assert report["numbers"]["same"]
    others = [each["numbers"]["next"] for each in read_reports(run_all(True))]
    assert others[0] == others[1]
    assert others[0][0] == others[0][1]


def test_files_and_states_are_read_by_one_process_and_by_several(report, run_all):
    assert report["saved"] == {"weights": True, "state": True}
    model = create("rev_vit_digits")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    read_tensors(run_all(True) / "state", {"model": model}, optimizer)
    expected = create("rev_vit_digits", checkpoint=run_all(True) / "weights.safetensors").state_dict()
    assert all(torch.equal(tensor, expected[key]) for key, tensor in model.state_dict().items())
    trained = create("rev_vit_digits")
    other = torch.optim.AdamW(trained.parameters(), lr=1e-2)
    run_step(trained, make_batch(trained))
    other.step()
    for name, p in trained.named_parameters():
        state = optimizer.state[model.get_parameter(name)]
        torch.testing.assert_close(state["exp_avg"], other.state[p]["exp_avg"], rtol=1e-4, atol=1e-7)


def test_optimizers_are_tried_with_divided_layers(report):
    assert report["optimizers"] == {"adamw": True, "adafactor": False}


def read_records(folder: Path) -> list[dict[str, float]]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: record[key] for key in ("epoch", "updates", "train_loss", "loss", "top1", "top5")} for record in records]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    """Train in this process; return the figures of both epochs."""
    with pytest.MonkeyPatch.context() as patch:  # what is only printed
        patch.setattr(loop, "MemoryTable", lambda *_: "")
        patch.setattr(WholeStep, "measure_modes", lambda step: ({}, None))
        return read_records(loop.train(load(1), tmp_path_factory.mktemp("alone") / "run").folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["whole-2", "whole-4", "cut"])
def test_training_equals_that_of_one_process(name, run_all, alone):
    """Layers over 2 processes; the same, divided over 2 more; and 4, 2 with other divisions, and 1 after each other."""
    divided = read_records(run_all(False) / name)
    assert len(divided) == len(alone) == 2
    for row, expected in zip(divided, alone, strict=True):
        assert row == pytest.approx(expected, abs=1e-5)


@pytest.mark.slow
def test_the_weights_of_a_run_are_whole(run_all):
    scores = evaluate_checkpoint(run_all(False) / "whole-4" / "last.safetensors")
    record = read_records(run_all(False) / "whole-4")[-1]
    assert scores.count == 355
    assert scores.metrics == {key: record[key] for key in ("top1", "top5")}
    assert scores.loss == pytest.approx(record["loss"], rel=1e-5)


def test_rows_are_dealt_by_pieces():
    rows = RowOrder(3, 2).deal(torch.arange(12))
    assert rows.tolist() == [0, 1, 4, 5, 8, 9, 2, 3, 6, 7, 10, 11]
    assert RowOrder(3, 2).restore(rows).tolist() == list(range(12))


@pytest.mark.parametrize(
    ("name", "processes", "message"),
    [
        (
            "rev_vit_digits",
            3,
            r"tensor_parallel=3 for the 4 heads of stages.0.blocks.0.f, 256 hidden channels .* Use 1, 2, 4\.",
        ),
        ("revnet_digits", 2, "tensor_parallel=2 for revnet_digits, which has neither: convolutions are not divided"),
    ],
)
def test_networks_that_cannot_be_divided_are_refused(name, processes, message):
    with pytest.raises(InputError, match=message):
        choose_parts(revzoo.create(name, device="meta"), processes)


def test_a_first_stage_with_few_heads_stays_whole():
    model = revzoo.create("rev_swin_t", device="meta")
    divided = choose_parts(model, 2)
    whole = [name for name, module in model.named_modules() if hasattr(module, "tensor_plan") and name not in divided]
    assert whole == ["stages.0.blocks.0.f", "stages.0.blocks.1.f"]
