"""States that a thread writes while training goes on: when they count, what a kill leaves of them, what an error means."""

import math
import shutil
import time
from threading import Event

import pytest
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from revzoo.errors import RevzooError
from revzoo.training import epochs
from revzoo.training.checksums import find_damage
from revzoo.training.divergence import DivergedError, add_losses
from revzoo.training.loop import resume, train
from revzoo.training.run import Run
from revzoo.training.run_folder import RunFolder
from tests.training.runs import RANDOM, assert_same_run, make_recipe, read_records

BEHIND = "train.save_async=true"


def list_names(folder):
    return [path.name for path in RunFolder(folder).list_states()]


def test_what_a_kill_leaves_resumes_to_the_same_end(tmp_path, monkeypatch, whole):
    """The folder is copied while the third state is being written, before and after it has its name, as by SIGKILL."""
    folder, copies = tmp_path / "run", {}

    def copy_after(point, owner, name, newest):
        original = getattr(owner, name)

        def call(*arguments):
            result = original(*arguments)
            if list_names(folder)[-1:] == [newest] and point not in copies:
                shutil.copytree(folder, tmp_path / point)
                copies[point] = list_names(folder)
            return result

        monkeypatch.setattr(owner, name, call)

    copy_after("its tensors", FileSystemWriter, "write_data", "00000-0000002")
    copy_after("its name", RunFolder, "publish_state", "00001-0000000")
    train(make_recipe(*RANDOM, BEHIND, "train.save_every=1"), folder)
    assert_same_run(whole, folder)
    assert copies == {"its tensors": ["00000-0000000", "00000-0000002"], "its name": ["00000-0000002", "00001-0000000"]}
    assert [(tmp_path / point / "state" / "writing").exists() for point in copies] == [True, False]
    monkeypatch.undo()
    for point in copies:
        assert [find_damage(state) for state in RunFolder(tmp_path / point).list_states()] == ["", ""]
        resume(tmp_path / point)
        assert_same_run(whole, tmp_path / point)


def test_training_goes_on_while_a_state_is_written(tmp_path, monkeypatch):
    """The thread waits for the last batch; the results of the epoch wait for the state, and the end for the next one.

    The first state is complete before the first batch.
    """
    trained, order = Event(), []
    publish, append, step = RunFolder.publish_state, RunFolder.append_record, Run.run_step

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
    monkeypatch.setattr(Run, "run_step", run_step)
    train(make_recipe("train.epochs=1", "train.save_every=2", BEHIND), tmp_path / "run")
    assert order == ["state", "state", "results", "state"]


@pytest.mark.parametrize("is_async", ["true", "false"])
def test_a_full_disk(tmp_path, monkeypatch, is_async, finished):
    """Of the thread, the error ends training where it is noticed."""
    publish = RunFolder.publish_state

    def fail(self, written, progress, *arguments):
        if progress.epoch:
            raise OSError(28, "No space left on device")
        publish(self, written, progress, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "publish_state", fail)
        with pytest.raises(RevzooError, match=f"No space left.*resume with revzoo train --resume {tmp_path}/run"):
            train(make_recipe("train.epochs=1", f"train.save_async={is_async}"), tmp_path / "run")
    assert [record["epoch"] for record in read_records(tmp_path / "run")] == [1]
    assert not (tmp_path / "run" / "state" / "writing").exists()
    assert list_names(tmp_path / "run") == ["00000-0000000"]
    resume(tmp_path / "run")
    assert_same_run(finished, tmp_path / "run")


def test_an_error_of_training_leaves_the_state_that_was_being_written(tmp_path, monkeypatch):
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
        train(make_recipe(BEHIND, "train.save_every=2"), tmp_path / "run")
