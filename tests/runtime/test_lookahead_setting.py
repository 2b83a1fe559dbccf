"""The option `lookahead`, and what "auto" chooses."""

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import revzoo
from revzoo.errors import InputError
from revzoo.runtime import ReversibleChain, lookahead, lookahead_setting
from tests.runtime.test_lookahead import backward, told


@pytest.mark.parametrize(("gain", "chosen"), [(0.8, True), (0.97, True), (0.99, False), (1.2, False)])
def test_auto_keeps_what_is_faster(gain, chosen, monkeypatch):
    chain = told(3, lambda _: None, lambda _: None)
    chain.lookahead = "auto"
    clock = [0.0]
    ahead: list[bool] = []
    original = lookahead._recover_in_thread

    def recover(recoverable: Any) -> Any:
        ahead.append(True)
        return original(recoverable)

    def on_gradient(_: int) -> None:
        clock[0] += gain if ahead else 1.0

    for step in chain.steps:
        step.on_gradient = on_gradient
    monkeypatch.setattr(lookahead, "_recover_in_thread", recover)
    monkeypatch.setattr(lookahead_setting.time, "perf_counter", lambda: clock[0])
    x = torch.randn(2, 3, 6)
    seen = []
    for _ in range(16):
        ahead.clear()
        backward(chain, *x)
        seen.append(bool(ahead))
    trials = 2 * (lookahead_setting._WARM_UPS + lookahead_setting._TRIALS)
    assert seen[:trials] == [False, True] * (trials // 2)
    assert seen[trials:] == [chosen] * (16 - trials)
    ahead.clear()
    backward(chain, *torch.randn(2, 4, 6))  # another shape is measured anew
    assert not ahead


def test_auto_counts_no_backward_that_ends_early():
    """The first backward of the graph is counted, the second raises in the middle."""
    chain, fails = told(3, lambda _: None, lambda _: None), False

    def on_gradient(_: int) -> None:
        if fails:
            raise ValueError("stop here")

    chain.lookahead = "auto"
    chain.steps[0].on_gradient = on_gradient
    x = torch.randn(2, 3, 6).requires_grad_()
    y = chain(*x)
    loss = (y[0] * y[1]).sum()
    loss.backward(retain_graph=True)
    fails = True
    with pytest.raises(ValueError, match="stop here"):
        loss.backward()
    fails = False
    backward(chain, *x)
    (choice,) = chain._lookahead._choices.values()
    assert [len(times) for times in choice._times] == [1, 0]
    assert [timing.is_ahead for timing in choice._pending] == [True]


def test_the_setting_is_checked_copied_and_said():
    chain = ReversibleChain([nn.Linear(6, 6)])
    assert chain.lookahead == 0
    for wrong in (2, -1, True, "yes", None):
        with pytest.raises(InputError, match='lookahead is 0 or 1, the number of steps recovered ahead of backward, or "auto"'):
            chain.lookahead = wrong
    for depth in (1, "auto"):
        assert ReversibleChain([nn.Linear(6, 6)], lookahead=depth).lookahead == depth
        assert revzoo.create("rev_vit_digits", lookahead=depth, device="meta").lookahead == depth
        chain.lookahead = depth
        assert copy.deepcopy(chain).lookahead == depth
    assert list(chain.state_dict()) == ["steps.0.weight", "steps.0.bias"]


@pytest.mark.slow
def test_the_benchmark_measures_every_row(tmp_path):
    file, out = Path(__file__).parents[2] / "benchmarks" / "lookahead.py", tmp_path / "figures.json"
    subprocess.run([sys.executable, "-W", "error", str(file), "--quick", "--out", str(out)], check=True, capture_output=True)
    figures = json.loads(out.read_text())["figures"]
    assert all(figure["value"] > 0 for figure in figures)
    timed = [figure for figure in figures if figure["what"].startswith("time over stored")]
    assert len(timed) == 2 * 2 * 6
    assert sum("auto" in figure["what"] for figure in figures) == 4
    peaks = {figure["method"]: figure["value"] for figure in figures if figure["net"] == "conv" and "peak" in figure["what"]}
    assert peaks["lookahead=1"] - peaks["lookahead=0"] == pytest.approx(4, abs=0.1)  # three refilled tensors, and a state
