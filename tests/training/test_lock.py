"""One process at a time works in a run's folder: the second is refused, and a dead one's lock is taken over."""

import subprocess
import sys
from pathlib import Path

import pytest

from revzoo.errors import DataError, InputError
from revzoo.training import loop, run_folder
from revzoo.training.loop import resume, train
from revzoo.training.run_folder import RunFolder
from tests.training.runs import make_recipe

# Holds a lock, says so, and waits to be killed.
HOLDER = """
import sys
from filelock import FileLock
with FileLock(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_the_second_process_is_refused_and_a_dead_ones_lock_taken(tmp_path, monkeypatch):
    monkeypatch.setattr(run_folder, "LOCK_SECONDS", 0.1)
    folder = RunFolder(tmp_path)
    folder.states.mkdir()
    command = [sys.executable, "-c", HOLDER, str(folder.lock)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        with pytest.raises(InputError, match="is in use by another process"), folder.hold_lock():
            pass
        process.kill()
    with folder.hold_lock():
        pass


def test_a_run_holds_the_lock_of_its_folder(tmp_path, monkeypatch):
    refused = []

    def look(run):
        with pytest.raises(InputError, match="is in use"), RunFolder(run.folder.path).hold_lock():
            pass
        refused.append(True)
        raise KeyboardInterrupt

    monkeypatch.setattr(run_folder, "LOCK_SECONDS", 0.1)
    monkeypatch.setattr(loop, "train_epochs", look)
    with pytest.raises(KeyboardInterrupt):
        train(make_recipe(), tmp_path / "run")
    with pytest.raises(KeyboardInterrupt):
        resume(tmp_path / "run")
    assert refused == [True] * 2


def test_two_new_runs_with_one_name(tmp_path, monkeypatch):
    """Both find the folder free; the second to write is refused."""
    apply_plan = loop.apply_plan

    def begin_another(run, *, anew):
        monkeypatch.setattr(loop, "apply_plan", apply_plan)
        (tmp_path / "run").mkdir()
        RunFolder(tmp_path / "run").write({"config.yaml": "first"})
        return apply_plan(run, anew=anew)

    monkeypatch.setattr(loop, "apply_plan", begin_another)
    with pytest.raises(InputError, match="is not empty. Resume that run"):
        train(make_recipe(), tmp_path / "run")
    assert (tmp_path / "run" / "config.yaml").read_text() == "first"


def test_new_runs_that_start_together_get_a_folder_each(tmp_path, monkeypatch):
    """The second starts while the first is being built; the third cannot be built, and leaves no folder."""
    monkeypatch.chdir(tmp_path)
    build_run, built = loop.build_run, []

    def build(recipe, folder, accelerator, **options):
        built.append(folder.path)
        number = len(built)
        if number == 1:
            train(recipe)
        if number == 2:
            with pytest.raises(DataError, match="no data"):
                train(recipe)
        if number == 3:
            raise DataError("no data")
        return build_run(recipe, folder, accelerator, **options)

    monkeypatch.setattr(loop, "build_run", build)
    monkeypatch.setattr(loop, "train_epochs", lambda run: None)
    train(make_recipe())
    assert built == [Path("runs/digits"), Path("runs/digits-2"), Path("runs/digits-3")]
    assert sorted(path.name for path in Path("runs").iterdir()) == ["digits", "digits-2"]
