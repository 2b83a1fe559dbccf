"""States that one number of processes saves and another loads, and training that does not depend on how many there are.

This file is also the program of the processes. They make one process group after another, of all of them, of half of them, and
so on to a single one; the tests read what they have written. Two of them only save and load, four also train.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import revzoo
from revzoo.errors import RevzooError, UnknownNameError
from revzoo.training.options import TrainOptions
from revzoo.training.origin import Origin, require_same
from revzoo.training.processes import call_on_all, call_on_main
from revzoo.training.run_folder import Progress, RunFolder
from revzoo.training.state_files import StateWriter, Upload, list_contents, read_state_tensors

SMALL = "stem.width=8,stages.0.width=8,stages.0.depth=2,block.f.heads=2"
RECIPE = [
    f"model.overrides=[{SMALL}]",
    "train.epochs=2",
    "train.accumulate=2",
    "schedule.warmup_epochs=1",
    "train.save_every=2",
]
MIXUP = "mixup={mixup_alpha: 0.8, cutmix_alpha: 1.0}"
OPTIMIZERS = ["adamw", "momentum", "lamb", "muon"]
BATCH = 240  # six an epoch, three updates
CUT = {"cut": "none", "cut-divided": "full"}  # trainings that others go on with, and their train.shard
MEASURED = {"seconds", "images_per_second", "memory_bytes"}
SECONDS = 300  # processes wait for each other no longer than this


# --- one of the processes


@contextmanager
def world(rank: int, processes: int, port: str) -> Iterator[bool]:
    """Yield whether this process is one of the first so many, which form a group inside the block, as Accelerate does it.

    One process is alone, without a group, as without a launcher.
    """
    if processes == 1:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
            del os.environ[name]
    elif rank < processes:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes), "MASTER_PORT": port}
    yield rank < processes
    if distributed.is_initialized():
        distributed.destroy_process_group()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def train_all(processes: int) -> None:
    """Train with these processes, and begin, go on with, or end a training that is cut into parts."""
    from revzoo.training import epochs, loop
    from revzoo.training.interrupt import StopSignal

    loop.describe_memory = lambda run: ""
    loop.describe_gradients = lambda run: ""
    epochs.plot_curves = lambda records, path: path.write_bytes(b"")
    loop.train(load(processes), Path(f"whole-{processes}"))
    poll = StopSignal.poll
    for name in CUT:
        train_part(name, processes)
    StopSignal.poll = poll


def load(processes: int, shard: str = "none") -> Any:
    from revzoo.training.recipe import load_recipe

    divided = [f"train.shard={shard}", "train.save_async=true"] if shard != "none" else []
    return load_recipe("digits", [*RECIPE, f"data.batch_size={BATCH // processes}", MIXUP, *divided])


def train_part(name: str, processes: int) -> None:
    """Begin a training that is cut into parts, or go on with it; one process ends it."""
    from revzoo.training import loop
    from revzoo.training.interrupt import Interrupted, StopSignal

    number, polls = count(1), {4: 2, 2: 5, 1: 0}[processes]
    StopSignal.poll = lambda stop: 15 if next(number) == polls else 0
    with suppress(Interrupted):
        loop.train(load(processes, CUT[name]), Path(name)) if processes == 4 else loop.resume(Path(name))


def make_sharded(seed: int, processes: int) -> tuple[dict[str, nn.Module], torch.optim.Optimizer]:
    """Return a network, sharded where there are several processes, its average, and its optimizer."""
    modules = {}
    for name in ("model", "ema"):
        torch.manual_seed(seed + len(modules))
        model = revzoo.create("rev_vit_digits", overrides=["stages.0.depth=2"])
        if processes > 1:
            mesh = distributed.init_device_mesh("cpu", (processes,))
            for part in [*model.steps, model]:
                fully_shard(part, mesh=mesh)
        modules[name] = model
    return modules, torch.optim.AdamW(modules["model"].parameters(), lr=1e-3)


def gather(modules: dict[str, nn.Module], optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return everything in full."""
    tensors = {f"{name}.{key}": tensor for name, module in modules.items() for key, tensor in module.state_dict().items()}
    for number, row in optimizer.state_dict()["state"].items():
        tensors |= {f"{number}.{key}": tensor for key, tensor in row.items()}
    return {name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for name, tensor in tensors.items()}


def save_sharded(folder: Path, processes: int) -> None:
    modules, optimizer = make_sharded(0, processes)
    modules["model"](torch.randn(4, 1, 8, 8)).logsumexp(1).mean().backward()
    optimizer.step()
    upload = Upload(Accelerator(cpu=True), RunFolder(folder.parent), TrainOptions(1, save_async=False))
    upload.start(list_contents(modules, optimizer, {"scaler": {}}), StateWriter(folder, lambda: None))
    tensors = gather(modules, optimizer)
    if distributed.get_rank() == 0:
        torch.save(tensors, folder.with_suffix(".pt"))


def load_sharded(folder: Path, processes: int) -> dict[str, Any]:
    """Load into a network of other values, and return what is different."""
    modules, optimizer = make_sharded(7, processes)
    settings = read_state_tensors(folder, modules, optimizer)
    expected, loaded = torch.load(folder.with_suffix(".pt")), gather(modules, optimizer)
    different = [name for name, tensor in expected.items() if not torch.equal(tensor, loaded.pop(name))]
    return {"different": different, "more": sorted(loaded), "compared": len(expected), "settings": settings}


def save_statistics(folder: Path) -> float:
    """Save a divided run in which BatchNorm has other statistics in each process; return those saved."""
    from revzoo.training.state import save_state

    norms = nn.BatchNorm1d(1), nn.BatchNorm1d(1)
    norms[0].running_mean.fill_(float(distributed.get_rank()))
    optimizers = [torch.optim.SGD(norm.parameters(), lr=1.0) for norm in norms]
    accelerator, run_folder, options = Accelerator(cpu=True), RunFolder(folder), TrainOptions(1, save_async=True)
    run: Any = SimpleNamespace(
        accelerator=accelerator,
        recipe=SimpleNamespace(train=options),
        folder=run_folder,
        upload=Upload(accelerator, run_folder, options),
        progress=Progress(),
        origin=SimpleNamespace(save=lambda state: None),
        mesh="divided",
        model=norms[0],
        evaluated=norms[0],
        ema=None,
        optimizer=SimpleNamespace(optimizer=optimizers[0]),
    )
    save_state(run)
    norms[0].running_mean.fill_(7.0)  # as training goes on while a thread writes
    run.upload.wait()
    read_state_tensors(run.folder.find_state(), {"model": norms[1]}, optimizers[1])
    return norms[1].running_mean.item()


def fail_behind(folder: Path) -> str:
    """Return the error of a state that the thread of the last process cannot write."""

    class Failing(StateWriter):
        def write_data(self, *arguments: Any) -> Any:
            if distributed.get_rank() == distributed.get_world_size() - 1:
                raise OSError(28, "No space left on device")
            return super().write_data(*arguments)

    upload = Upload(Accelerator(cpu=True), RunFolder(folder), TrainOptions(1, save_async=True))
    upload.start({"x": torch.zeros(1)}, Failing(folder / "state" / "writing", lambda: None))
    try:
        upload.wait()
    except RevzooError as error:
        return str(error)
    return ""


class Strange(Exception):
    """An error that cannot be sent to other processes."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(one)


def catch_errors() -> list[str]:
    """Return what a process says of errors that only one of them finds; one that waits for another ends at the test's limit."""
    accelerator, rank = Accelerator(cpu=True), distributed.get_rank()

    def fail(process: int, error: Exception) -> int:
        if rank == process:
            raise error
        return rank

    def compare() -> None:
        examples = {"training": {"count": 4 + rank, "digest": "a"}}
        require_same(Origin({"train": {"seed": rank}}, {}, None, examples, 8), Origin.list_changes)

    caught, unknown = [], UnknownNameError("recipe", "x", ["y"])
    for work in (
        lambda: call_on_main(accelerator, lambda: fail(0, RevzooError("from 0"))),
        lambda: call_on_all(lambda: fail(1, unknown)),
        lambda: call_on_all(lambda: fail(1, Strange("from", "1"))),
        compare,
    ):
        with pytest.raises((RevzooError, RuntimeError)) as error:
            work()
        caught.append(str(error.value))
    assert call_on_all(lambda: fail(-1, unknown)) == rank
    return caught


def try_optimizers(processes: int) -> list[str]:
    """Return which optimizers update divided parameters as whole ones, but for rounding, and have state that can be saved.

    Muon computes in bfloat16: hence 2 % of what the steps have moved a parameter.
    """
    mesh, generator = distributed.init_device_mesh("cpu", (processes,)), torch.Generator().manual_seed(0)
    return [opt for opt in OPTIMIZERS if try_optimizer(opt, mesh, generator)]


def try_optimizer(opt: str, mesh: Any, generator: torch.Generator) -> bool:
    from revzoo.checkpoint.slices import copy_whole_, gather_whole
    from revzoo.training.optimizer import make_optimizer

    # The first is not divided evenly; some optimizers treat small matrices apart.
    starts = [torch.randn(shape, generator=generator) for shape in ((33,), (32, 48), (24, 20, 3, 3))]
    whole, divided = (nn.ParameterList([start.clone() for start in starts]) for _ in range(2))
    fully_shard(divided, mesh=mesh)
    first, second = (make_optimizer(parameters, opt, 1e-2, 0.05) for parameters in (whole, divided))
    for _ in range(3):
        for p, part in zip(whole, divided, strict=True):
            p.grad, part.grad = torch.randn(p.shape, generator=generator), torch.empty_like(part)
            copy_whole_(part.grad, p.grad)
        first.step()
        second.step()
    rows = zip(starts, whole, map(gather_whole, divided), strict=True)
    is_same = all((p - end).norm() <= 0.02 * (p - start).norm() for start, p, end in rows)
    state = [(t.shape, p.shape) for p in divided for t in second.state[p].values() if isinstance(t, DTensor)]
    return is_same and all(shape == expected for shape, expected in state)


def work(rank: int, processes: int, folder: Path) -> None:
    torch.set_num_threads(1)
    os.chdir(folder)
    results: dict[str, Any] = {"loaded": {}, "files": 0}
    ports, first = iter(os.environ["PORTS"].split()), processes
    while processes:
        with world(rank, processes, next(ports)) as is_one:
            if is_one:
                if first == 4:
                    train_all(processes)
                if processes == first:
                    save_sharded(Path("sharded"), processes)
                    results["files"] = len(list(Path("sharded").glob(f"__{rank}_*")))
                    results["statistics"] = save_statistics(Path("norms"))
                    results["error"] = fail_behind(Path("full"))
                    results["caught"] = catch_errors()
                    results["optimizers"] = try_optimizers(processes)
                results["loaded"][processes] = load_sharded(Path("sharded"), processes)
        processes //= 2
    Path(f"{rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    from conftest import fork

    processes = 2 if sys.argv[2] == "quick" else 4
    sys.exit(fork(processes, lambda rank: work(rank, processes, Path(sys.argv[1]))))


# --- the tests


@pytest.fixture(scope="module")
def results(run_all: Callable[[bool], Path]) -> Callable[[int], Path]:
    """Return a function that gives the folder of so many processes, after running them once."""

    @cache
    def run(processes: int) -> Path:
        # A store for each group, as torchrun has one: no other process can take a port before it is used.
        stores = [distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in range(3)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("MASTER_ADDR", "127.0.0.1")
            patch.setenv("PORTS", " ".join(str(store.port) for store in stores))
            patch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
            patch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
            return run_all(processes == 2)

    return run


def read_records(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if key not in MEASURED} for line in lines]


def assert_same_metrics(one: Path, other: Path) -> None:
    left, right = read_records(one), read_records(other)
    assert len(left) == len(right) == 2
    for row, expected in zip(left, right, strict=True):
        assert row == pytest.approx(expected, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("fewer", [1, 2])
def test_training_does_not_depend_on_the_number_of_processes(results, fewer):
    assert_same_metrics(results(4) / "whole-4", results(4) / f"whole-{fewer}")


@pytest.mark.slow
@pytest.mark.parametrize("name", CUT)
def test_fewer_processes_go_on_to_the_same_end(results, name):
    cut = results(4) / name
    assert_same_metrics(cut, results(4) / "whole-4")
    progress = json.loads((cut / "state" / "00002-0000000" / "progress.json").read_text())
    assert (progress["processes"], progress["loss_sum"]) == (1, 0.0)
    logs = [(cut / "log" / f"process-{rank}.txt").is_file() for rank in range(4)]
    assert logs == [False, True, True, True]


@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_sharded_states_are_loaded_by_fewer_processes_bit_for_bit(results, processes):
    folder = results(processes)
    for rank in range(processes):
        report = json.loads((folder / f"{rank}.json").read_text())
        assert report["files"] == 1  # each has written its shards
        assert [int(number) for number in report["loaded"]] == [n for n in (4, 2, 1) if rank < n <= processes]
        for loaded in report["loaded"].values():
            assert loaded == {"different": [], "more": [], "compared": 5 * 31, "settings": {"scaler": {}}}


def test_a_state_has_the_mean_of_all_processes_statistics_when_it_was_saved(results):
    """Otherwise a run that goes on in the middle of an epoch would forget those of all processes but the first."""
    for rank in range(2):
        assert json.loads((results(2) / f"{rank}.json").read_text())["statistics"] == 0.5


def test_an_error_of_one_thread_is_raised_in_all_processes(results):
    for rank in range(2):
        error = json.loads((results(2) / f"{rank}.json").read_text())["error"]
        assert error.startswith("Nothing more can be saved in full ([Errno 28] No space left on device). Is the disk full?")


def test_an_error_of_one_process_is_raised_in_both(results):
    for rank in range(2):
        *caught, compared = json.loads((results(2) / f"{rank}.json").read_text())["caught"]
        assert caught == ["from 0", "Unknown recipe 'x'. Allowed: y.", "Strange: from"]
        assert "and process 1 has other train.seed, training examples than process 0." in compared


def test_optimizers_update_divided_parameters_as_whole_ones(results):
    for rank in range(2):
        assert json.loads((results(2) / f"{rank}.json").read_text())["optimizers"] == OPTIMIZERS
