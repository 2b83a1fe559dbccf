"""Runs that tests share, and training without what takes longer than it."""

import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from revzoo.training import epochs, loop
from tests.training.runs import RANDOM, make_recipe

_SHOWN = [
    (module, name, getattr(module, name))
    for module, name in ((loop, "describe_memory"), (loop, "describe_gradients"), (epochs, "plot_curves"))
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
        patch.setattr(loop, "describe_memory", lambda run: "")
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


@pytest.fixture
def read_state() -> Callable[[Path], dict]:
    """Return a function that reads the tensors and settings of the newest state of a run."""

    def read(run: Path) -> dict:
        state = max((run / "state").glob("0*"))
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

    return read


@pytest.fixture(scope="session")
def whole(tmp_path_factory) -> Path:
    """A run that was never interrupted."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    loop.train(make_recipe(*RANDOM), folder)
    return folder


@pytest.fixture(scope="session")
def finished(tmp_path_factory) -> Path:
    """A run of one epoch; tests change copies of it."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    loop.train(make_recipe("train.epochs=1"), folder)
    return folder


@pytest.fixture
def copied(finished, tmp_path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))
