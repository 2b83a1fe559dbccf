"""The benchmark of plans of ordinary networks runs: table 1 of the paper."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

FILE = Path(__file__).parents[2] / "benchmarks" / "reforwarding.py"


@pytest.mark.slow
def test_table_1_is_counted(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", str(FILE), "--quick", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "reforwarding.json").read_text())["table"]
    assert [(row["name"], row["batch"], row["published"]) for row in rows] == [("alexnet", 2, 2620), ("resnet18", 2, 2898)]
    assert all(0 < row["planned"] < row["stored"] and 1 <= row["flops"] <= 1.34 for row in rows)
