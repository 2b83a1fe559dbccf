"""States that a thread writes while training goes on: when they count, what a kill leaves of them, what an error means."""

import math
import shutil
import time
from threading import Event
from typing import Any

import pytest
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from revzoo.errors import RevzooError
from revzoo.training import epochs
from revzoo.training.divergence import DivergedError, add_losses
from revzoo.training.loop import resume, train
from revzoo.training.run_folder import RunFolder, find_damage
from revzoo.training.setup import Run

BEHIND = "train.save_async=true"
# After what the process dies, while a state is being written: (class, method) that has just run in the thread.
POINTS = {
    "its tensors": (FileSystemWriter, "write_data"),
    "its table of contents": (FileSystemWriter, "finish"),
    "its name": (RunFolder, "publish_state"),
}


@pytest.fixture
def settings(random_settings) -> list[str]:
    """Overrides of a run whose states are written behind, two an epoch."""
    return [*random_settings, BEHIND, "train.save_every=1"]


def list_names(folder: RunFolder) -> list[str]:
    return [path.name for path in folder.list_states()]


def after(patch, owner: type, name: str, call: Any) -> None:
    """Call something with the arguments of a method each time it has run."""
    original = getattr(owner, name)

    def wrapped(*arguments):
        result = original(*arguments)
        call(*arguments)
        return result

    patch.setattr(owner, name, wrapped)


def test_what_a_kill_leaves_resumes_to_the_same_end(recipe, settings, tmp_path, monkeypatch, whole, assert_same_run):
    """The folder is copied while the third state is being written, at each point; a copy is what SIGKILL would leave."""
    folder = tmp_path / "run"
    copies: dict[str, list[str]] = {}

    def copy(point: str, *arguments: Any) -> None:
        states = list_names(RunFolder(folder))
        if states[-1:] == ["00001-0000000" if point == "its name" else "00000-0000002"] and point not in copies:
            shutil.copytree(folder, tmp_path / point)
            copies[point] = states

    with monkeypatch.context() as patch:
        for point, (owner, name) in POINTS.items():
            after(patch, owner, name, lambda *arguments, point=point: copy(point))
        train(recipe(*settings), folder)
    assert_same_run(whole, folder)
    before = ["00000-0000000", "00000-0000002"]
    assert copies == {"its tensors": before, "its table of contents": before, "its name": ["00000-0000002", "00001-0000000"]}
    assert [(tmp_path / point / "state" / "writing").exists() for point in POINTS] == [True, True, False]
    for point in POINTS:
        assert [find_damage(state) for state in RunFolder(tmp_path / point).list_states()] == ["", ""]
        resume(tmp_path / point)
        assert_same_run(whole, tmp_path / point)


def test_training_goes_on_while_a_state_is_written(recipe, tmp_path, monkeypatch):
    """The thread waits for the last batch; the results of the epoch wait for the state, and the end for the next one.

    The first state is complete before the first batch.
    """
    trained, order = Event(), []
    publish, append, step = RunFolder.publish_state, RunFolder.append_record, Run._run_step

    def publish_late(self, written, progress, *arguments):
        if progress.batch:
            assert trained.wait(60)
            time.sleep(0.2)
        publish(self, written, progress, *arguments)
        order.append("state")

    def append_record(self, record):
        order.append("results")
        append(self, record)

    def run_step(run, batch, targets):
        if run.progress.batch == 3:
            trained.set()
        return step(run, batch, targets)

    monkeypatch.setattr(RunFolder, "publish_state", publish_late)
    monkeypatch.setattr(RunFolder, "append_record", append_record)
    monkeypatch.setattr(Run, "_run_step", run_step)
    train(recipe("train.epochs=1", "train.save_every=2", BEHIND), tmp_path / "run")
    assert order == ["state", "state", "results", "state"]


def test_an_error_of_the_thread_ends_training_where_it_is_noticed(recipe, tmp_path, monkeypatch, read_records):
    publish = RunFolder.publish_state

    def fail(self, written, progress, *arguments):
        if progress.epoch:
            raise OSError(28, "No space left on device")
        publish(self, written, progress, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "publish_state", fail)
        with pytest.raises(RevzooError, match=f"No space left.*resume with revzoo train --resume {tmp_path}/run"):
            train(recipe(BEHIND), tmp_path / "run")
    assert [record["epoch"] for record in read_records(tmp_path / "run")] == [1]
    assert not (tmp_path / "run" / "state" / "writing").exists()
    assert list_names(RunFolder(tmp_path / "run")) == ["00000-0000000"]
    resume(tmp_path / "run")
    assert [record["epoch"] for record in read_records(tmp_path / "run")] == [1, 2]


def test_an_error_of_training_leaves_the_state_that_was_being_written(recipe, tmp_path, monkeypatch):
    """It is complete before the error is raised, and the message names it."""
    diverged, publish = Event(), RunFolder.publish_state

    def publish_late(self, written, progress, *arguments):
        if progress.batch:
            assert diverged.wait(60)
            time.sleep(0.2)
        publish(self, written, progress, *arguments)

    def diverge(run, losses):
        if run.progress.batch < 4:
            return add_losses(run, losses)
        diverged.set()
        return add_losses(run, losses * math.nan)

    monkeypatch.setattr(RunFolder, "publish_state", publish_late)
    monkeypatch.setattr(epochs, "add_losses", diverge)
    with pytest.raises(DivergedError, match="nothing was saved since .*run/state/00000-0000002"):
        train(recipe(BEHIND, "train.save_every=2"), tmp_path / "run")
