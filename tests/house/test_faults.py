"""Trainings that are broken on purpose end as those left alone: the benchmarks that break them, run quickly."""

import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["faults", "restarts"])
def test_trainings_are_broken(name, tmp_path):
    """Three are killed, and each of the others' faults is tried once; broken code is noticed."""
    command = [sys.executable, str(FOLDER / f"{name}.py"), "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
