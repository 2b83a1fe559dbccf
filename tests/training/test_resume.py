"""Stopped, killed and damaged runs: each resumes to the end of an uninterrupted one, or says what is wrong."""

import math
import signal
from itertools import count
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator

import revzoo
from revzoo.errors import CheckpointError, InputError
from revzoo.training import epochs
from revzoo.training.divergence import DivergedError, check_test_loss, check_weights
from revzoo.training.interrupt import StopSignal
from revzoo.training.loop import resume, train
from revzoo.training.recipe import load_recipe
from revzoo.training.run_folder import RunFolder
from revzoo.training.setup import build_run
from revzoo.training.state import save_state
from tests.training.runs import FAST, RANDOM, assert_same_run, interrupted, killed, make_recipe, read_records


# At the end of the first epoch; in its evaluation, which is repeated; in the second epoch.
@pytest.mark.parametrize(("polls", "state"), [(2, "00000-0000004"), (4, "00000-0000004"), (5, "00001-0000002")])
def test_an_interrupted_run_resumes_to_the_same_end(whole, tmp_path, monkeypatch, polls, state):
    """The folder has the name of a recipe, which must not be mistaken for it."""
    monkeypatch.chdir(tmp_path)
    with interrupted(polls) as caught:
        train(make_recipe(*RANDOM), Path("digits"))
    assert caught.value.signum == signal.SIGTERM
    assert "revzoo train --resume digits" in str(caught.value)
    assert RunFolder(Path("digits")).find_state().name == state
    assert Path("digits/metrics.jsonl").is_file() == (polls > 4)
    resume(Path("digits"))
    assert_same_run(whole, tmp_path / "digits")


@pytest.mark.parametrize(
    ("owner", "name", "call"),
    [(epochs, "save_state", 2), (RunFolder, "publish_state", 3)],
    ids=["after its metrics", "after its state, not yet renamed"],
)
def test_a_killed_run_resumes_to_the_same_end(whole, tmp_path, owner, name, call):
    """The newest state is that of the first epoch, whatever was written since; the one before it is kept."""
    with killed(owner, name, call):
        train(make_recipe(*RANDOM), tmp_path / "run")
    assert sorted(path.name for path in (tmp_path / "run" / "state").glob("0*")) == ["00000-0000000", "00001-0000000"]
    assert len(read_records(tmp_path / "run")) == 2
    resume(tmp_path / "run")
    assert_same_run(whole, tmp_path / "run")


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_real_signal_is_recorded_once(signum):
    before = signal.getsignal(signum)
    with StopSignal(Accelerator()) as stop:
        assert stop.poll() == 0
        signal.raise_signal(signum)
        assert stop.poll() == signum
        assert signal.getsignal(signum) is before  # so that a second one stops at once
    assert signal.getsignal(signum) is before


@pytest.mark.slow
def test_killed_processes_go_on_to_the_same_end(tmp_path, monkeypatch, start_training):
    """Ctrl-C, then SIGKILL after resuming, then to the end, with the command line and real signals."""
    long = [*FAST, *RANDOM, "train.epochs=3"]
    train(load_recipe("digits", long), tmp_path / "whole")
    with start_training("digits", *long, "--out", "digits", epoch=1, signum=signal.SIGINT) as process:
        _, errors = process.communicate()
    assert errors.endswith("\nrevzoo: Stopped, everything is saved. Resume with: revzoo train --resume digits\n"), errors
    assert process.returncode == 130
    assert len(read_records(tmp_path / "digits")) == 1
    with start_training("--resume", "digits", epoch=2, signum=signal.SIGKILL) as process:
        _, errors = process.communicate()
    assert process.returncode == -signal.SIGKILL, errors
    assert len(read_records(tmp_path / "digits")) == 2
    monkeypatch.chdir(tmp_path)
    resume(Path("digits"))
    assert_same_run(tmp_path / "whole", tmp_path / "digits")


def test_a_finished_run_stays_as_it_is(copied, capsys):
    before = read_records(copied)
    assert str(resume(copied)) in capsys.readouterr().out
    assert read_records(copied) == before


def test_a_run_killed_while_it_begins_is_started_again(finished, tmp_path):
    """By the same command, in the same folder, as torchrun does it."""
    recipe = make_recipe("train.epochs=1")
    with killed(RunFolder, "write"):  # its first state is there, and its recipe is not
        train(recipe, tmp_path / "run")
    with pytest.raises(CheckpointError, match=f"no config.yaml in it.*start it again, with --out {tmp_path}/run"):
        resume(tmp_path / "run")
    train(recipe, tmp_path / "run")
    assert_same_run(finished, tmp_path / "run")


def test_weights_that_are_not_finite_are_not_saved(finished, tmp_path, monkeypatch):
    """They became so in the last update of the epoch, whose loss was finite."""
    finish_epoch, calls = epochs._finish_epoch, count(1)

    def spoil(run, epoch, stop):
        if next(calls) == 1:
            next(run.ema.module.parameters()).data[0] = math.nan
        return finish_epoch(run, epoch, stop)

    monkeypatch.setattr(epochs, "_finish_epoch", spoil)
    message = r"NaN in the weights \(the running average of stem.* in epoch 1, by update 4; nothing was saved since .*00000-0"
    with pytest.raises(DivergedError, match=message):
        train(make_recipe("train.epochs=1"), tmp_path / "run")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    resume(tmp_path / "run")
    assert_same_run(finished, tmp_path / "run")


def test_weights_and_losses_that_are_not_finite_are_named(tmp_path):
    run = build_run(make_recipe(), tmp_path / "run", resumed=False)
    check_weights(run)
    torch.nn.init.constant_(run.model.get_parameter("head.linear.bias"), math.inf)
    with pytest.raises(DivergedError, match=r"NaN in the weights \(head.linear.bias\) in epoch 1, by update 0; nothing was"):
        save_state(run)
    with pytest.raises(DivergedError, match="The test loss is nan"):
        check_test_loss(run, math.nan)


def test_folders_that_are_no_runs(tmp_path):
    with pytest.raises(CheckpointError, match="there is no config.yaml in it. Name one that revzoo train has written.$"):
        resume(tmp_path)
    (tmp_path / "config.yaml").write_text(make_recipe().to_yaml())
    (tmp_path / "spec.yaml").write_text(revzoo.load_spec("rev_vit_digits").to_yaml())
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(CheckpointError, match="cannot be resumed: there is no state"):
        resume(tmp_path)
    with pytest.raises(InputError, match="is not empty"):
        train(make_recipe(), tmp_path)
