"""`revzoo verify`: status 0 for a model that is safe to train, 1 for one that is not."""

import re

import pytest
import torch

import revzoo
import zoo_cli
from revzoo.analysis.verify import VerifyReport
from revzoo.checkpoint.files import save_weights
from revzoo.errors import MissingValueError


def test_a_model_that_is_safe_to_train(run):
    assert "Safe to train in float32: gradients agree" in run("verify", "rev_vit_digits", "--batch", 2)


def test_exact_dtype_device_and_overrides_reach_the_model(monkeypatch, run):
    reports = []

    def verify(model, batch):
        reports.append((model.exact, next(model.parameters()).dtype, len(batch), model.num_outputs, batch.device.type))
        return VerifyReport(torch.float64, {})

    monkeypatch.setattr("revzoo.analysis.verify.verify", verify)
    run("verify", "rev_vit_digits", "--exact", "--batch", 3)
    run("verify", "rev_vit_digits", "--dtype", "float64", "--device", "meta", "head.outputs=3")
    assert reports == [(True, torch.float32, 3, 10, "cpu"), (False, torch.float64, 4, 3, "meta")]


def test_a_model_that_is_not(capsys, monkeypatch):
    report = VerifyReport(torch.float32, {}, problems=("The gradients are wrong.",))
    monkeypatch.setattr("revzoo.analysis.verify.verify", lambda model, batch: report)
    assert zoo_cli.main(["verify", "rev_vit_digits"]) == 1
    assert capsys.readouterr().out == f"{report}\n"


def test_a_run_is_verified_with_its_weights(monkeypatch, run, tmp_path):
    model = revzoo.create("rev_vit_digits", overrides=["stages.0.depth=1"])
    (tmp_path / "spec.yaml").write_text(model.spec.to_yaml())
    save_weights(model, tmp_path / "best.safetensors")
    verified = []
    report = VerifyReport(torch.float32, {})
    monkeypatch.setattr("revzoo.analysis.verify.verify", lambda model, batch: verified.append(model) or report)
    run("verify", str(tmp_path))
    own = model.state_dict()
    assert all(torch.equal(own[key], tensor) for key, tensor in verified[0].state_dict().items())


@pytest.mark.parametrize("command", [["verify"], ["numerics"], ["profile"], ["plan", "--budget", "1TiB"]])
def test_a_batch_that_does_not_fit_is_refused_before_anything_is_allocated(command, capsys):
    assert zoo_cli.main([*command, "rev_vit_digits", "stages.0.depth=1", "--batch", "100000000"]) == 2
    error = capsys.readouterr().err
    fitting = re.fullmatch(
        r"revzoo: A step of 100000000 examples takes .* TiB, and .* are free\. What fits: --batch (\d+)\.\n", error
    )
    assert 10 < int(fitting[1]) < 10**8


def test_a_network_that_asks_for_values_is_not_counted(monkeypatch, run):
    def fail(*arguments, **options):
        raise MissingValueError("Bytes are counted without values.")

    monkeypatch.setattr("revzoo.analysis.step_memory.measure_modes", fail)
    assert "Safe to train" in run("verify", "rev_vit_digits", "stages.0.depth=1", "--batch", 2)
