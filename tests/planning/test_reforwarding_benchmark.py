"""The benchmark of plans of captured graphs runs, and no counted peak is above the predicted one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

FILE = Path(__file__).parents[2] / "benchmarks" / "reforwarding.py"


@pytest.mark.slow
def test_the_benchmark_runs(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", str(FILE), "--quick", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    network = json.loads((tmp_path / "reforwarding.json").read_text())["networks"]["resnet18"]
    assert (tmp_path / "reforwarding_resnet18.png").exists()
    assert network["points"][-1][1] == 1.0
    assert len(network["counted"]) > 0
    assert all(each["counted_bytes"] <= each["predicted_bytes"] for each in network["counted"])
