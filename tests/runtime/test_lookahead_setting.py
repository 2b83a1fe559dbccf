"""The option `lookahead`."""

import copy
import json
import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn

import revzoo
from revzoo.errors import InputError
from revzoo.runtime import ReversibleChain


def test_the_setting_is_checked_copied_and_said():
    chain = ReversibleChain([nn.Linear(6, 6)])
    assert chain.lookahead == 0
    for wrong in (2, -1, True, "auto", None):
        with pytest.raises(InputError, match=f"lookahead is 0 or 1, .*Received: {wrong!r}"):
            chain.lookahead = wrong
    assert ReversibleChain([nn.Linear(6, 6)], lookahead=1).lookahead == 1
    assert revzoo.create("rev_vit_digits", lookahead=1, device="meta").lookahead == 1
    chain.lookahead = 1
    assert copy.deepcopy(chain).lookahead == 1
    assert list(chain.state_dict()) == ["steps.0.weight", "steps.0.bias"]


@pytest.mark.slow
def test_the_benchmark_measures_every_row(tmp_path):
    file, out = Path(__file__).parents[2] / "benchmarks" / "lookahead.py", tmp_path / "figures.json"
    subprocess.run([sys.executable, "-W", "error", str(file), "--quick", "--out", str(out)], check=True, capture_output=True)
    figures = json.loads(out.read_text())["figures"]
    assert all(figure["value"] > 0 for figure in figures)
    timed = [figure for figure in figures if figure["what"].startswith("time over stored")]
    assert len(timed) == 2 * 2 * 6
    peaks = {figure["method"]: figure["value"] for figure in figures if figure["net"] == "conv" and "peak" in figure["what"]}
    assert peaks["lookahead=1"] - peaks["lookahead=0"] == pytest.approx(4, abs=0.1)  # three refilled tensors, and a state
