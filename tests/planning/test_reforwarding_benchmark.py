"""The benchmarks of plans of ordinary networks run: table 1 of the paper, and fronts beside rivals."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
slow = pytest.mark.slow


def run(file: str, *arguments: str) -> None:
    command = [sys.executable, "-W", "error", str(FOLDER / file), "--quick", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@slow
def test_table_1_is_counted(tmp_path: Path) -> None:
    run("reforwarding.py", "--out", str(tmp_path))
    rows = json.loads((tmp_path / "reforwarding.json").read_text())["table"]
    assert [(row["name"], row["batch"], row["published"]) for row in rows] == [("alexnet", 2, 2620), ("resnet18", 2, 2898)]
    assert all(0 < row["planned"] < row["stored"] and 1 <= row["flops"] <= 1.34 for row in rows)


@slow
def test_fronts_stand_beside_rivals(tmp_path: Path) -> None:
    run("planning.py", "--only", "ordinary", "--out", str(tmp_path))
    networks = json.loads((tmp_path / "planning.json").read_text())["rows"]["ordinary"]["networks"]
    assert list(networks) == ["resnet18", "bert"]
    for name, network in networks.items():
        assert (tmp_path / f"front_{name}.png").exists()
        assert network["points"][-1][1] == 1.0
        assert all(each["counted_bytes"] <= each["predicted_bytes"] for each in network["counted"])
        budget = "activation_memory_budget"
        methods = [(row["method"], row["setting"]) for row in network["rivals"]]
        assert [method for method, _ in methods] == ["checkpoint per block", budget, budget]
        for row in network["rivals"]:
            assert row["plan_is_as_good"] == (row["planned_flops"] is not None and row["planned_flops"] <= row["flops"])
            assert row["planned_fraction"] is None or row["planned_fraction"] <= row["fraction"]
        assert network["rivals"][0]["flops"] > 1.3
