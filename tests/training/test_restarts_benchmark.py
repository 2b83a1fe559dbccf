"""`benchmarks/restarts.py --quick` kills a process under torchrun, and loses nothing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILE = ROOT / "benchmarks" / "restarts.py"


@pytest.mark.slow
def test_a_restarted_training_ends_as_if_left_alone():
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    run = subprocess.run([sys.executable, str(FILE), "--quick"], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "1 of 2 processes killed: as if left alone" in run.stdout
    said = [line for line in run.stdout.splitlines() if line.startswith("revzoo: ") or "Traceback" in line]
    assert len(said) <= 1, said  # of the process that was left, if torchrun let it speak
    assert all("waited in vain for another one, which has ended or hangs" in line for line in said)
