"""The benchmark of the training loop runs, and measures what it says."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

FILE = Path(__file__).parents[2] / "benchmarks" / "training_loop.py"


@pytest.mark.slow
def test_both_loops_train(tmp_path):
    command = [sys.executable, str(FILE), "--epochs", "1", "--out", str(tmp_path / "figures.json")]
    subprocess.run(command, check=True, capture_output=True)
    results = json.loads((tmp_path / "figures.json").read_text())
    [figure] = results["figures"]
    assert (figure["method"], figure["depth"], figure["target"]) == ("revzoo train", 1, 1 / 0.95)
    assert 0.2 < figure["value"] < 5  # a ratio of times: one epoch is too few to ask for more
    assert results["hardware"]["threads"] == 1
