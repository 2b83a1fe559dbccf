"""Training verifies gradients before the first step and after it is resumed, and leaves no trace of it."""

import math

import pytest
import torch

from revzoo.analysis.verify import VerifyReport
from revzoo.training import gradient_check
from revzoo.training.gradient_check import describe_gradients
from revzoo.training.loop import resume
from revzoo.training.setup import build_run
from tests.training.runs import make_recipe


def test_a_line_after_resuming(copied, shown, capsys):
    resume(copied)
    assert capsys.readouterr().out.count("Gradients verified on 2 examples against storing everything: relative error ") == 1


def test_exact_arithmetic_has_the_same_bits(tmp_path):
    run = build_run(make_recipe("model.exact=true"), tmp_path / "run", resumed=False)
    before = {key: tensor.clone() for key, tensor in run.model.state_dict().items()}
    random = torch.get_rng_state()
    assert describe_gradients(run) == "Gradients verified on 2 examples against storing everything: bit-identical."
    assert all(torch.equal(before[key], tensor) for key, tensor in run.model.state_dict().items())
    assert torch.equal(random, torch.get_rng_state())
    assert all(p.grad is None for p in run.model.parameters())


def test_look_ahead_waits_for_training(tmp_path):
    """It would warn that it steps aside, which is an error here."""
    run = build_run(make_recipe(), tmp_path / "run", resumed=False)
    run.model.lookahead = 1
    assert describe_gradients(run).startswith("Gradients verified")
    assert run.model.lookahead == 1


@pytest.mark.parametrize(
    ("setting", "error", "end"),
    [
        ("false", 0.03, "Use model.exact=true: inversion is then exact."),
        ("true", 0.03, "Use model.schedule=recompute."),
        ("false", math.nan, "They differ."),  # nothing could be compared
    ],
)
def test_gradients_that_are_off_are_said(tmp_path, monkeypatch, setting, error, end):
    report = VerifyReport(torch.float32, {}, gradient_error=error, problems=("They differ.",))
    monkeypatch.setattr(gradient_check, "verify", lambda model, batch: report)
    line = describe_gradients(build_run(make_recipe(f"model.exact={setting}"), tmp_path / "run", resumed=False))
    assert line.startswith("Warning: gradients are not those of storing everything")
    assert line.endswith(end)
