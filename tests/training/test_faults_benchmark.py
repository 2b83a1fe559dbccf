"""`benchmarks/faults.py --quick` breaks trainings and loses none."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILE = ROOT / "benchmarks" / "faults.py"


@pytest.mark.slow
def test_nothing_is_lost():
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    run = subprocess.run([sys.executable, str(FILE), "--quick"], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    rows = {
        line[:14].strip(): list(map(int, line[14:].split()))
        for line in run.stdout.splitlines()
        if re.search(r"(\s+\d+){3}$", line)
    }
    assert {kind: sum(counts) for kind, counts in rows.items()} == {
        "killed": 1,
        "damaged": 2,
        "started twice": 1,
        "full disk": 1,
    }
    assert all(lost == 0 for _, _, lost in rows.values())
