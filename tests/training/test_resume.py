"""Stopped, killed and damaged runs: each resumes to the end of an uninterrupted one, or says what is wrong."""

import math
import re
import signal
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
from accelerate import Accelerator

import revzoo
from revzoo.errors import CheckpointError, InputError, RecoveryError
from revzoo.training import epochs, loop
from revzoo.training.divergence import DivergedError
from revzoo.training.interrupt import Interrupted, StopSignal
from revzoo.training.loop import resume, train
from revzoo.training.recipe import load_recipe
from revzoo.training.run_folder import RunFolder


class Killed(BaseException):
    """What nothing catches, as if the process had been killed."""


# In the first epoch, at its very end, in the second; the evaluation of two batches is in between.
@pytest.mark.parametrize("polls", [1, 2, 5])
def test_an_interrupted_run_resumes_to_the_same_end(
    whole, tmp_path, monkeypatch, polls, recipe, assert_same_run, random_settings
):
    """The folder has the name of a recipe, which must not be mistaken for it."""
    monkeypatch.chdir(tmp_path)
    signals = iter([0] * (polls - 1) + [signal.SIGTERM])
    with monkeypatch.context() as patch:
        patch.setattr(StopSignal, "poll", lambda self: next(signals))
        with pytest.raises(Interrupted, match="revzoo train --resume digits") as caught:
            train(recipe(*random_settings), Path("digits"))
    assert caught.value.signum == signal.SIGTERM
    assert Path("digits/metrics.jsonl").is_file() == (polls > 2)
    resume(Path("digits"))
    assert_same_run(whole, tmp_path / "digits")


# What is called when the process dies, in which call, and how many epochs are in the metrics by then.
KILLS = {
    "within the second epoch": (StopSignal, "poll", 6, 1),  # after two updates, two test batches and one update
    "after its metrics": (epochs, "save_state", 2, 2),
    "after its state, not yet renamed": (RunFolder, "publish_state", 3, 2),
}


@pytest.mark.parametrize("when", KILLS)
def test_a_killed_run_resumes_to_the_same_end(whole, tmp_path, monkeypatch, when, recipe, assert_same_run, random_settings):
    """The newest state is that of the first epoch, whatever was written since; the one before it is kept."""
    owner, name, call, epochs_written = KILLS[when]
    original, calls = getattr(owner, name), count(1)

    def kill(*arguments):
        if next(calls) == call:
            raise Killed
        return original(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, kill)
        with pytest.raises(Killed):
            train(recipe(*random_settings), tmp_path / "run")
    assert sorted(path.name for path in (tmp_path / "run" / "state").glob("0*")) == ["00000-0000000", "00001-0000000"]
    assert len(RunFolder(tmp_path / "run").read_records()) == epochs_written
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
def test_killed_processes_go_on_to_the_same_end(
    fast, tmp_path, monkeypatch, start_training, read_records, assert_same_run, random_settings
):
    """Ctrl-C, then SIGKILL after resuming, then to the end, with the command line and real signals."""
    long = [*fast, *random_settings, "train.epochs=5"]
    train(load_recipe("digits", long), tmp_path / "whole")
    with start_training("digits", *long, "--out", "digits", epoch=2, signum=signal.SIGINT) as process:
        _, errors = process.communicate()
    assert errors.endswith("\nrevzoo: Stopped, everything is saved. Resume with: revzoo train --resume digits\n"), errors
    assert process.returncode == 130
    assert len(read_records(tmp_path / "digits")) == 2
    with start_training("--resume", "digits", epoch=4, signum=signal.SIGKILL) as process:
        _, errors = process.communicate()
    assert process.returncode == -signal.SIGKILL, errors
    assert len(read_records(tmp_path / "digits")) == 4
    monkeypatch.chdir(tmp_path)
    resume(Path("digits"))
    assert_same_run(tmp_path / "whole", tmp_path / "digits")


def test_a_finished_run_stays_as_it_is(copied, capsys, read_records):
    before = read_records(copied)
    assert str(resume(copied)) in capsys.readouterr().out
    assert read_records(copied) == before


@pytest.mark.parametrize("when", ["before its first state", "before its recipe was saved"])
def test_a_run_killed_while_it_begins_is_started_again(
    whole, tmp_path, monkeypatch, recipe, when, assert_same_run, random_settings
):
    """By the same command, in the same folder, as torchrun does it."""

    def kill(*arguments):
        raise Killed

    owner, name = (loop, "save_state") if when == "before its first state" else (RunFolder, "write")
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, kill)
        with pytest.raises(Killed):
            train(recipe(*random_settings), tmp_path / "run")
    with pytest.raises(CheckpointError, match=f"no config.yaml in it.*start it again, with --out {tmp_path}/run"):
        resume(tmp_path / "run")
    train(recipe(*random_settings), tmp_path / "run")
    assert_same_run(whole, tmp_path / "run")


@pytest.mark.parametrize("where", ["model", "ema", "test loss"])
def test_weights_that_are_not_finite_are_not_saved(
    whole, tmp_path, monkeypatch, recipe, where, assert_same_run, random_settings
):
    """They became so in the last update of the second epoch, whose loss was finite."""

    def spoil(run, epoch, stop):
        if epoch == 1 and where != "test loss":
            model = run.model if where == "model" else run.ema.module
            next(model.parameters()).data[0] = math.nan
        return finish_epoch(run, epoch, stop)

    def evaluate(model, *arguments, **options):
        scores = loop_evaluate(model, *arguments, **options)
        return replace(scores, loss=math.nan) if next(calls) == 2 else scores

    finish_epoch, loop_evaluate, calls = epochs._finish_epoch, epochs.evaluate, count(1)
    message = {
        "model": r"NaN in the weights \(stem",
        "ema": r"NaN in the weights \(the running average of stem",
        "test loss": "The test loss is nan",
    }[where]
    with monkeypatch.context() as patch:
        patch.setattr(epochs, "_finish_epoch", spoil)
        if where == "test loss":
            patch.setattr(epochs, "evaluate", evaluate)
        with pytest.raises(
            DivergedError, match=f"{message}.* in epoch 2, by update 4; nothing was saved since .*00001-0000000"
        ):
            train(recipe(*random_settings), tmp_path / "run")
    assert len(RunFolder(tmp_path / "run").read_records()) == 1
    resume(tmp_path / "run")
    assert_same_run(whole, tmp_path / "run")


def test_a_signal_during_the_evaluation(whole, tmp_path, monkeypatch, recipe, assert_same_run, random_settings):
    """It is answered after the batch, and the evaluation is repeated."""
    polls = count(1)
    with monkeypatch.context() as patch:
        patch.setattr(StopSignal, "poll", lambda self: signal.SIGTERM if next(polls) == 4 else 0)
        with pytest.raises(Interrupted):
            train(recipe(*random_settings), tmp_path / "run")
    assert next(polls) == 5  # two updates, then two test batches
    assert RunFolder(tmp_path / "run").find_state().name == "00000-0000004"
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    resume(tmp_path / "run")
    assert_same_run(whole, tmp_path / "run")


def test_leaving_the_range_of_exact_arithmetic_says_when(recipe, tmp_path):
    settings = ("model.exact=true", "optimizer.opt=sgd", "optimizer.lr=1e6", "schedule.warmup_epochs=0", "train.save_every=1")
    message = r"Exact arithmetic holds states below .*This was in epoch 1, update (\d+). The newest state is .*00000-000000(\d)"
    with pytest.raises(RecoveryError, match=message) as caught:
        train(recipe(*settings, "train.clip_grad=null"), tmp_path / "run")
    update, batch = map(int, re.search(message, str(caught.value)).groups())
    assert update == batch + 1 > 1


def test_folders_that_are_no_runs(recipe, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        CheckpointError,
        match="not the folder of a run: there is no config.yaml in it. Name one that revzoo train has written.$",
    ):
        resume(tmp_path / "empty")
    (tmp_path / "empty" / "config.yaml").write_text(recipe().to_yaml())
    (tmp_path / "empty" / "spec.yaml").write_text(revzoo.load_spec("rev_vit_digits").to_yaml())
    (tmp_path / "empty" / "metrics.jsonl").touch()
    with pytest.raises(CheckpointError, match="cannot be resumed: there is no state"):
        resume(tmp_path / "empty")
    with pytest.raises(InputError, match="is not empty"):
        train(recipe(), tmp_path / "empty")
