"""A recipe that trains in a second, and the comparison of runs."""

import json
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from revzoo.training import epochs, loop
from revzoo.training.options import Recipe
from revzoo.training.planned_step import WholeStep
from revzoo.training.recipe import load_recipe

SMALL = "stem.width=8,stages.0.width=8,stages.0.depth=2,block.f.heads=2,block.drop_path.max=0.2,head.dropout=0.1"
# Four batches an epoch.
FAST = ["data.batch_size=320", "train.epochs=2", "schedule.warmup_epochs=1", f"model.overrides=[{SMALL}]"]
# Everything that draws random numbers, two updates an epoch.
RANDOM = ["mixup={mixup_alpha: 0.8, cutmix_alpha: 1.0}", "train.accumulate=2", "train.epochs=3"]
_MEASURED = {"seconds", "images_per_second", "texts_per_second", "memory_bytes"}  # different in every run
_SHOWN = [
    (module, name, getattr(module, name))
    for module, name in ((WholeStep, "measure_modes"), (loop, "describe_gradients"), (epochs, "plot_curves"))
]
# Trains as `revzoo train` does, and sends itself a signal when it has written the metrics of an epoch.
SIGNALLED = """
import os, sys, zoo_cli
from revzoo.training.run_folder import RunFolder
append, (epoch, signum) = RunFolder.append_record, map(int, sys.argv[1:3])
def append_and_signal(folder, record):
    append(folder, record)
    if record["epoch"] == epoch:
        os.kill(os.getpid(), signum)
RunFolder.append_record = append_and_signal
sys.exit(zoo_cli.main(["train", *sys.argv[3:]]))
"""


@pytest.fixture(autouse=True, scope="module")
def _nothing_shown() -> Iterator[None]:
    """Leave out the table of memory, verifying and the curves, which take longer than a small run; `shown` puts them back."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WholeStep, "measure_modes", lambda step: ({}, None))
        patch.setattr(loop, "describe_gradients", lambda run: "")
        patch.setattr(epochs, "plot_curves", lambda records, path: path.write_bytes(b""))
        yield


@pytest.fixture
def shown(monkeypatch) -> None:
    """Show everything, as outside of the tests."""
    for module, name, function in _SHOWN:
        monkeypatch.setattr(module, name, function)


@pytest.fixture
def start_training(tmp_path: Path) -> Callable[..., subprocess.Popen]:
    """Return a function that trains in a process of its own, in `tmp_path`, which sends itself a signal after an epoch."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}

    def start(*arguments: str, epoch: int = 0, signum: int = 0) -> subprocess.Popen:
        command = [sys.executable, "-c", SIGNALLED, str(epoch), str(int(signum)), *arguments]
        return subprocess.Popen(command, env=environment, cwd=tmp_path, stderr=subprocess.PIPE, text=True)

    return start


@pytest.fixture(scope="session")
def fast() -> list[str]:
    """Overrides that make any recipe for digits small."""
    return list(FAST)


@pytest.fixture(scope="session")
def recipe() -> Callable[..., Recipe]:
    """Return the digits recipe, made small, with further overrides."""
    return lambda *overrides: load_recipe("digits", [*FAST, *overrides])


def _read_records(folder: Path) -> list[dict]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if key not in _MEASURED} for line in lines]


def _assert_same_run(one: Path, other: Path) -> None:
    assert _read_records(one) == _read_records(other)
    for name in ("last.safetensors", "best.safetensors"):
        left, right = load_file(one / name), load_file(other / name)
        assert left.keys() == right.keys()
        assert all(torch.equal(left[key], right[key]) for key in left)


@pytest.fixture
def read_records() -> Callable[[Path], list[dict]]:
    """Return a function that reads the metrics of a run, without times and memory."""
    return _read_records


@pytest.fixture
def assert_same_run() -> Callable[[Path, Path], None]:
    """Return a function that asserts that two runs have the same metrics and weights, bit for bit."""
    return _assert_same_run


def _read_state(state: Path) -> dict:
    saved = FileSystemReader(state).read_metadata().state_dict_metadata
    contents = {
        name: torch.empty(facts.size, dtype=facts.properties.dtype) if isinstance(facts, TensorStorageMetadata) else None
        for name, facts in saved.items()
    }
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*assuming the intent is to load in a single process")
        load(contents, storage_reader=FileSystemReader(state), planner=planner)
    return contents


@pytest.fixture
def read_state() -> Callable[[Path], dict]:
    """Return a function that reads the tensors and settings of a state."""
    return _read_state


@pytest.fixture(scope="session")
def random_settings() -> list[str]:
    """Overrides with which everything draws random numbers, with two updates an epoch."""
    return list(RANDOM)


@pytest.fixture(scope="session")
def whole(tmp_path_factory, recipe) -> Path:
    """A run that was never interrupted."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    loop.train(recipe(*RANDOM), folder)
    return folder


@pytest.fixture(scope="session")
def finished(tmp_path_factory, recipe) -> Path:
    """A run of one epoch; tests change copies of it."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    loop.train(recipe("train.epochs=1"), folder)
    return folder


@pytest.fixture
def copied(finished, tmp_path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))
