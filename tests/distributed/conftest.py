"""Test files that are programs, too: their processes run all cases in one group, and the tests look at what they wrote."""

import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

import revzoo


def fork(processes: int, work: Callable[[int], object]) -> int:
    """Give every process its rank; return 0 if all of them have ended well. They share what this one has imported."""
    children = []
    for rank in range(processes):
        if not (child := os.fork()):
            try:
                work(rank)
            except BaseException as error:
                print(f"process {rank}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
                os._exit(1)
            os._exit(0)
        children.append(child)
    return max(os.waitpid(child, 0)[1] for child in children) and 1


@pytest.fixture(scope="module")
def run_all(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], Path]:
    """Return a function that runs the quick or the slow cases of a file, once, and returns the folder of their runs."""

    @cache
    def run(quick: bool) -> Path:
        folder = tmp_path_factory.mktemp(request.path.stem)
        environment = {**os.environ, "PYTHONPATH": str(Path(revzoo.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
        environment["ACCELERATE_USE_CPU"] = "true"
        command = [sys.executable, "-W", "ignore", str(request.path), str(folder), "quick" if quick else "slow"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=request.module.SECONDS)
        assert done.returncode == 0, done.stderr
        (folder / "output").write_text(done.stdout)
        return folder

    return run
