"""Stopped, killed and damaged runs: each resumes to the end of an uninterrupted one, or says what is wrong."""

import os
import shutil
import signal
import subprocess
import sys
import time
from itertools import count
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file

import revzoo
from revzoo.errors import CheckpointError, InputError, RevzooError, SpecError
from revzoo.training import loop
from revzoo.training.interrupt import Interrupted, StopSignal
from revzoo.training.loop import load_state, resume, train
from revzoo.training.recipe import load_recipe
from revzoo.training.run_folder import RunFolder
from revzoo.training.setup import build_run

ROOT = Path(__file__).parents[2]
# Everything that draws random numbers, two updates an epoch.
RANDOM = ["mixup={mixup_alpha: 0.8, cutmix_alpha: 1.0}", "train.accumulate=2", "train.epochs=3"]


class Killed(BaseException):
    """What nothing catches, as if the process had been killed."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory, recipe) -> Path:
    """A run that was never interrupted."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    train(recipe(*RANDOM), folder)
    return folder


@pytest.mark.parametrize("updates", [1, 2, 3])  # in the first epoch, at its very end, in the second
def test_an_interrupted_run_resumes_to_the_same_end(whole, tmp_path, monkeypatch, updates, recipe, assert_same_run):
    """The folder has the name of a recipe, which must not be mistaken for it."""
    monkeypatch.chdir(tmp_path)
    signals = iter([0] * (updates - 1) + [signal.SIGTERM])
    with monkeypatch.context() as patch:
        patch.setattr(StopSignal, "poll", lambda self: next(signals))
        with pytest.raises(Interrupted, match="revzoo train --resume digits") as caught:
            train(recipe(*RANDOM), Path("digits"))
    assert caught.value.signum == signal.SIGTERM
    assert Path("digits/metrics.jsonl").is_file() == (updates > 2)
    resume(Path("digits"))
    assert_same_run(whole, tmp_path / "digits")


# What is called when the process dies, in which call, and how many epochs are in the metrics by then.
KILLS = {
    "within the second epoch": (StopSignal, "poll", 4, 1),
    "after its metrics": (loop, "save_state", 3, 2),  # the first call is before the first epoch
    "after its state, not yet renamed": (RunFolder, "publish_state", 3, 2),
}


@pytest.mark.parametrize("when", KILLS)
def test_a_killed_run_resumes_to_the_same_end(whole, tmp_path, monkeypatch, when, recipe, assert_same_run):
    """The newest state is that of the first epoch, whatever was written since."""
    owner, name, call, epochs_written = KILLS[when]
    original, calls = getattr(owner, name), count(1)

    def kill(*arguments):
        if next(calls) == call:
            raise Killed
        return original(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, kill)
        with pytest.raises(Killed):
            train(recipe(*RANDOM), tmp_path / "run")
    assert [path.name for path in (tmp_path / "run" / "state").glob("0*")] == ["00001-0000000"]
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
def test_killed_processes_go_on_to_the_same_end(fast, tmp_path, monkeypatch, read_records, assert_same_run):
    """Ctrl-C, then SIGKILL after resuming, then to the end, with the command line and real signals."""
    long = [*fast, *RANDOM, "train.epochs=12"]
    train(load_recipe("digits", long), tmp_path / "whole")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}

    def start(*arguments: str) -> subprocess.Popen:
        command = [sys.executable, "-m", "zoo_cli", "train", *arguments]
        return subprocess.Popen(command, env=environment, cwd=tmp_path, stderr=subprocess.PIPE, text=True)

    def wait_for_epochs(count: int, process: subprocess.Popen) -> None:
        metrics = tmp_path / "digits" / "metrics.jsonl"
        while not metrics.is_file() or len(metrics.read_text().splitlines()) < count:
            assert process.poll() is None, process.communicate()[1]
            time.sleep(0.01)

    with start("digits", *long, "--out", "digits") as process:
        wait_for_epochs(2, process)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 130
        assert errors == "\nrevzoo: Stopped, everything is saved. Resume with: revzoo train --resume digits\n"
    assert 2 <= len(read_records(tmp_path / "digits")) < 12
    with start("--resume", "digits") as process:
        wait_for_epochs(len(read_records(tmp_path / "digits")) + 2, process)
        process.kill()
    assert len(read_records(tmp_path / "digits")) < 12
    monkeypatch.chdir(tmp_path)
    resume(Path("digits"))
    assert_same_run(tmp_path / "whole", tmp_path / "digits")


@pytest.fixture(scope="module")
def finished(tmp_path_factory, recipe) -> Path:
    """A run of one epoch; tests change copies of it."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    train(recipe("train.epochs=1"), folder)
    return folder


@pytest.fixture
def copied(finished, tmp_path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def test_a_finished_run_stays_as_it_is(copied, capsys, read_records):
    before = read_records(copied)
    assert str(resume(copied)) in capsys.readouterr().out
    assert read_records(copied) == before


def damage(file: Path, content: bytes | None) -> None:
    if content is None:
        file.unlink()
    else:
        file.write_bytes(content)


STATE = "state/00001-0000000"


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("spec.yaml", None, "there is no spec.yaml in it"),
        ("config.yaml", None, "there is no config.yaml in it"),
        ("spec.yaml", b"name: [", "invalid YAML"),
        ("metrics.jsonl", None, "There is no .*metrics.jsonl, the metrics of 1 epochs. Put it back"),
        (f"{STATE}/progress.json", b"[]", f"{STATE}/progress.json cannot be used"),
        (f"{STATE}/model.safetensors", b"half", "model.safetensors cannot be read"),
    ],
)
def test_damaged_folders_are_not_resumed(copied, file, content, message):
    damage(copied / file, content)
    with pytest.raises((CheckpointError, SpecError), match=message):
        resume(copied)


@pytest.mark.parametrize("content", [b"[1]\n", b"\xff{\n"])
def test_damaged_metrics(copied, content):
    damage(copied / "metrics.jsonl", content)
    with pytest.raises(CheckpointError, match="Line 1 of .*metrics.jsonl is not the metrics of an epoch. Delete that line"):
        RunFolder(copied).drop_records_after(1)


@pytest.mark.parametrize(
    "content", [None, b"", b"[]", b'{"loss_sums": [0.0], "epoch": 7}', b'{"loss_sums": 3, "epoch": 1}', b'{"loss_sums": []}']
)
def test_damaged_progress(copied, content):
    damage(copied / STATE / "progress.json", content)
    message = rf"{STATE}/progress.json cannot be used \(.*\)\. There is no state before it: start again\."
    with pytest.raises(CheckpointError, match=message):
        RunFolder(copied).read_progress()


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("model.safetensors", None, "No weights file at .*model.safetensors"),
        ("model.safetensors", b"half", "model.safetensors cannot be read"),
        ("ema.safetensors", b"half", "ema.safetensors cannot be read"),
        ("optimizer.bin", None, f"{STATE}/optimizer.bin cannot be used"),
        ("optimizer.bin", b"half", f"{STATE}/optimizer.bin cannot be used"),
    ],
)
def test_damaged_states(finished, copied, file, content, message):
    run = build_run(load_recipe(finished), copied, resumed=True)
    damage(copied / STATE / file, content)
    with pytest.raises(CheckpointError, match=message):
        load_state(run)


def test_a_state_of_another_model(finished, copied):
    (copied / "spec.yaml").write_text(revzoo.load_spec(copied, ["stages.0.depth=1"]).to_yaml())
    run = build_run(load_recipe(finished), copied, resumed=True)
    with pytest.raises(CheckpointError, match=rf"{STATE} cannot be used \(.*model.safetensors does not fit"):
        load_state(run)


def test_a_whole_state_is_loaded(finished, copied):
    run = build_run(load_recipe(finished), copied, resumed=True)
    load_state(run)
    for name, model in (("model", run.model), ("ema", run.ema.module)):
        saved, own = load_file(finished / STATE / f"{name}.safetensors"), model.state_dict()
        assert saved.keys() == own.keys()
        assert all(torch.equal(own[key], tensor) for key, tensor in saved.items())
    assert len(run.optimizer.state_dict()["state"]) > 0


def test_the_state_before_a_damaged_one(copied, read_records):
    newest = copied / "state" / "00002-0000000"
    newest.mkdir()
    with pytest.raises(CheckpointError, match=f"Delete {newest} to resume from the state before it"):
        resume(copied)
    newest.rmdir()
    for name in ("my-notes", "99999-copy"):  # neither states nor in the way
        (newest.parent / name).mkdir()
    (newest.parent / "00009-0000000").touch()
    with (copied / "metrics.jsonl").open("a") as file:
        file.write('{"epoch": 2, "tr')
    assert resume(copied).folder == copied
    assert [record["epoch"] for record in read_records(copied)] == [1]


def test_a_full_disk(recipe, tmp_path, monkeypatch, read_records):
    publish_state = RunFolder.publish_state

    def publish(self, written, progress):
        if progress.epoch:
            raise OSError(28, "No space left on device")
        publish_state(self, written, progress)

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "publish_state", publish)
        with pytest.raises(RevzooError, match=f"No space left.*resume with revzoo train --resume {tmp_path}/run"):
            train(recipe(), tmp_path / "run")
    resume(tmp_path / "run")
    assert [record["epoch"] for record in read_records(tmp_path / "run")] == [1, 2]


def test_folders_that_are_no_runs(recipe, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.yaml").write_text(recipe().to_yaml())
    (tmp_path / "empty" / "spec.yaml").write_text(revzoo.load_spec("rev_vit_digits").to_yaml())
    with pytest.raises(CheckpointError, match="not the folder of a run: there is no state"):
        resume(tmp_path / "empty")
    with pytest.raises(InputError, match="is not empty"):
        train(recipe(), tmp_path / "empty")
