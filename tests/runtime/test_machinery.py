"""The benchmark of the runtime's own work runs, and measures what it says."""

import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

FILE = Path(__file__).parents[2] / "benchmarks" / "machinery.py"


@pytest.mark.slow
def test_every_row_is_measured(tmp_path):
    out = tmp_path / "figures.json"
    done = subprocess.run(
        [sys.executable, "-W", "error", str(FILE), "--quick", "--out", str(out)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "overhead per step [us]" in done.stdout
    figures = json.loads(out.read_text())
    assert figures["hardware"]["threads"] == 1
    methods, targets = defaultdict(set), {}
    for figure in figures["figures"]:
        methods[figure["what"], figure["net"]].add(figure["method"])
        targets[figure["net"], figure["method"]] = figure["target"]
    overheads = {"invert", "recompute", "selective", "checkpoint", "torch selective", "loop"}
    assert methods["overhead per step [us]", "LayerNorm-MLP"] == overheads
    assert methods["overhead per step [us]", "rev_vit_digits"] == overheads
    for net in ("transformer", "conv"):
        assert methods["time over invert", net] == {"invert [s]", "exact", "8 kept bits"}
    assert methods["time per step [us]", "product with a weight"] == {"invert"}
    for net in ("timm ResNet", "ResNeXt-101"):
        assert methods["time over BatchNorm", net] == {"BatchNorm [s]", "in-place ABN"}
        assert targets[net, "in-place ABN"] == 1.05
    assert targets["LayerNorm-MLP", "invert"] == 100
    assert (targets["transformer", "8 kept bits"], targets["conv", "8 kept bits"]) == (1.06, 1.12)
