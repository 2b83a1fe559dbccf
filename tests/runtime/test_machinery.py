"""The benchmark of the runtime's own work runs, and measures what it says."""

import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from tests.cuda_stub import stub

FILE = Path(__file__).parents[2] / "benchmarks" / "machinery.py"


def measure(out, *options):
    """Return the methods of each figure and network, and their targets."""
    done = subprocess.run(
        [sys.executable, "-W", "error", str(FILE), "--quick", "--out", str(out), *options],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    content = json.loads(out.read_text())
    assert content["hardware"]["threads"] == 1
    methods, targets = defaultdict(set), {}
    for figure in content["figures"]:
        methods[figure["what"], figure["net"]].add(figure["method"])
        targets[figure["what"], figure["net"], figure["method"]] = figure["target"]
        assert figure["what"] in done.stdout
    return dict(methods), targets


@pytest.mark.slow
def test_every_row_is_measured(tmp_path):
    methods, targets = measure(tmp_path / "figures.json")
    overheads = {"invert", "recompute", "selective", "checkpoint", "torch selective", "loop"}
    for net in ("LayerNorm-MLP", "rev_vit_digits", "tiny transformer"):
        assert methods["overhead per step [us]", net] == overheads
    assert methods["time beyond plain over checkpoint", "LayerNorm-MLP"] == {"checkpoint [us]", "invert"}
    assert methods["time beyond one forward over a stored step", "tiny transformer"] == {"stored [us]", "invert"}
    of_calls = {f"{method}, {phase}" for method in ("checkpoint", "invert") for phase in ("forward", "backward")}
    assert methods["Python calls per step", "LayerNorm-MLP"] == of_calls
    for net in ("transformer", "conv"):
        assert methods["time over invert", net] == {"invert [s]", "exact", "8 kept bits"}
    assert methods["time per step [us]", "product with a weight"] == {"invert"}
    for net in ("timm ResNet", "ResNeXt-101"):
        assert methods["time over BatchNorm", net] == {"BatchNorm [s]", "in-place ABN"}
        assert targets["time over BatchNorm", net, "in-place ABN"] == 1.05
    assert targets["overhead per step [us]", "LayerNorm-MLP", "invert"] == 100
    assert targets["time over invert", "transformer", "8 kept bits"] == 1.06
    assert targets["time over invert", "conv", "8 kept bits"] == 1.12


@pytest.mark.slow
def test_every_row_of_the_host_is_measured(tmp_path):
    try:
        stub.build(stub.SOURCE.parent / "build")
    except stub.Unavailable as reason:
        pytest.skip(f"the CUDA stub cannot be built: {reason}")
    methods, targets = measure(tmp_path / "figures.json", "--stub")
    rows = {
        "host time beyond plain over checkpoint": {"checkpoint [us]", "invert", "recompute"},
        "host time beyond plain over torch selective": {"torch selective [us]", "selective"},
        "host time beyond plain over invert": {"invert [us]", "look-ahead", "exact", "8 kept bits"},
        "kernels beyond plain per step": {"checkpoint", "invert"},
        "kernels beyond plain per step, compared": {"checkpoint", "invert"},
    }
    assert methods == {(what, net): names for what, names in rows.items() for net in ("bf16 autocast", "float32")}
    assert targets["host time beyond plain over checkpoint", "bf16 autocast", "invert"] == 0.45
    assert targets["kernels beyond plain per step", "bf16 autocast", "invert"] == 10
