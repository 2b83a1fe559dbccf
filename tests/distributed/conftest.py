"""Test files that are programs, too: their processes run all cases in one group, and the tests look at what they wrote."""

import faulthandler
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from subprocess import PIPE
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import FakeWork, Work
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map_only

import revzoo
from revzoo.runtime.live_bytes import LiveBytes
from revzoo.runtime.nested import tensors_in

WAIT = torch.ops._c10d_functional.wait_tensor.default


class BytesOfRank(LiveBytes):
    """Live bytes without two things that are not the rank's.

    One is what gloo holds: its copies of what it reduces, and what it has sent or received, which its threads let go of only
    some time after the call. The other are the FakeTensors with which DTensor finds out, once, what shape an operation returns.
    """

    def watch(self, tensors: Any) -> frozenset[int]:
        return super().watch([t for t in tensors_in(tensors) if not isinstance(t, FakeTensor)])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_collective = func.namespace in ("c10d", "_c10d_functional") and func is not WAIT
        run = partial(communicate, func) if is_collective else func
        return super().__torch_dispatch__(run, types, args, kwargs)


def communicate(collective: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a collective to its end on copies that nobody counts."""
    copies = tree_map_only(torch.Tensor, torch.clone, args)
    returned = collective(*copies, **kwargs)
    if collective.namespace == "_c10d_functional":
        return tree_map_only(torch.Tensor, lambda t: WAIT(t).clone(), returned)
    work = returned[-1] if isinstance(returned, tuple) else returned
    Work.unbox(work).wait()
    for own, copy in zip(tensors_in(args[0]), tensors_in(copies[0]), strict=True):  # the first argument is what it writes to
        own.data.copy_(copy)
    done = FakeWork().boxed()
    return (args[0], done) if isinstance(returned, tuple) else done


def fork(processes: int, work: Callable[[int], object]) -> int:
    """Give every process its rank; return 0 if all of them have ended well. They share what this one has imported."""
    errors = os.fdopen(os.dup(2), "w")  # the processes of a run send their standard error to its log
    faulthandler.enable(errors)
    children = []
    for rank in range(processes):
        if not (child := os.fork()):
            torch.set_num_threads(1)  # makes PyTorch's pool anew, before two threads do so at once, which aborts the process
            try:
                work(rank)
            except BaseException as error:
                print(f"process {rank}: {type(error).__name__}: {error}", file=errors, flush=True)
                os._exit(1)
            os._exit(0)
        children.append(child)
    ends = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    for rank, end in enumerate(ends):
        if end < 0:
            print(f"process {rank}: ended by {signal.Signals(-end).name}", file=errors, flush=True)
    return int(any(ends))


@pytest.fixture(scope="session")
def start() -> Iterator[Callable[..., None]]:
    """Return a function that runs a program in a folder. One process forks all: importing what they share takes seconds."""
    paths = {"PYTHONPATH": str(Path(revzoo.__file__).parents[1]), "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("starter.py"))]
    with subprocess.Popen(command, env=os.environ | paths, text=True, stdin=PIPE, stdout=PIPE) as starter:

        def start(program: Path, folder: Path, *words: str, seconds: int = 300) -> None:
            call = (str(program), str(folder), words, os.environ | paths, seconds)
            print(json.dumps(call), file=starter.stdin, flush=True)
            done = SimpleNamespace(returncode=int(starter.stdout.readline()))
            assert done.returncode == 0, (folder / "errors").read_text()

        yield start
        starter.stdin.close()


@pytest.fixture(scope="module")
def run_all(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, start) -> Callable[[bool], Path]:
    """Return a function that runs the quick or the slow cases of a file, once, and returns the folder of their runs."""

    @cache
    def run(quick: bool) -> Path:
        folder = tmp_path_factory.mktemp(request.path.stem)
        start(request.path, folder, "quick" if quick else "slow", seconds=request.module.SECONDS)
        return folder

    return run


@pytest.fixture
def launch(tmp_path: Path, start) -> Callable[..., list[str]]:
    """Return a function that types commands of launchers in an empty folder, and returns what each has printed."""

    def launch(*lines: str) -> list[str]:
        start(Path(__file__).with_name("launcher.py"), tmp_path, *lines)
        return [(tmp_path / f"output-{number}.txt").read_text() for number in range(len(lines))]

    return launch
