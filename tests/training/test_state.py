"""States on the disk: what is kept, what a damaged one means, what is never saved."""

import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import revzoo
from revzoo.errors import CheckpointError, RevzooError, SpecError
from revzoo.training.checksums import find_damage
from revzoo.training.loop import resume, train
from revzoo.training.origin import read_origin
from revzoo.training.recipe import load_recipe
from revzoo.training.run_folder import Progress, RunFolder
from revzoo.training.setup import build_run
from revzoo.training.state import load_state
from tests.training.runs import RANDOM, assert_same_run, make_recipe, read_records

STATE = "state/00001-0000000"


def damage(file: Path, content: bytes | None) -> None:
    if content is None:
        file.unlink()
    else:
        file.write_bytes(content)


DAMAGE = {
    "a flipped bit": ("__0_0.distcp", "flip", "__0_0.distcp has changed since it was written"),
    "a missing file": ("origin.json", None, "origin.json is missing"),
    "strange checksums": ("checksums.sha256", b"\xff\xfe", "checksums.sha256 is missing or damaged"),
}


def test_damaged_folders_are_not_resumed(copied):
    damage(copied / "metrics.jsonl", b"\xff{\n")
    with pytest.raises(CheckpointError, match="Line 1 of .*metrics.jsonl is not the metrics of an epoch. Delete that line"):
        RunFolder(copied).keep_records(Progress(epoch=1))
    damage(copied / "spec.yaml", b"name: [")
    with pytest.raises(SpecError, match="invalid YAML"):
        resume(copied)
    damage(copied / "spec.yaml", None)
    with pytest.raises(CheckpointError, match="there is no spec.yaml in it"):
        resume(copied)


def test_a_state_damaged_after_it_was_looked_through(finished, copied):
    run = build_run(load_recipe(finished), copied, resumed=True)
    damage(copied / STATE / "__0_0.distcp", b"half")
    with pytest.raises(CheckpointError, match=f"{STATE} cannot be used .* Delete .*{STATE}"):
        load_state(run)
    damage(copied / STATE / "origin.json", b"[]")
    with pytest.raises(CheckpointError, match=f"{STATE}/origin.json cannot be used .* Delete .*{STATE} to resume"):
        read_origin(RunFolder(copied))
    damage(copied / STATE / "progress.json", b"[")
    shutil.rmtree(copied / "state" / "00000-0000000")
    with pytest.raises(CheckpointError, match=rf"{STATE}/progress.json cannot be used \(.*\)\. There is no state before it"):
        RunFolder(copied).read_progress()


def test_a_state_of_another_model(finished, copied):
    (copied / "spec.yaml").write_text(revzoo.load_spec(copied, ["stages.0.depth=2"]).to_yaml())
    run = build_run(load_recipe(finished), copied, resumed=True)
    with pytest.raises(
        CheckpointError, match=rf"{STATE} cannot be used \(The state does not fit the model: .*stages.0.blocks.1"
    ):
        load_state(run)


def test_a_whole_state_is_loaded(finished, copied):
    run = build_run(load_recipe(finished), copied, resumed=True)
    load_state(run)
    saved, own = load_file(finished / "last.safetensors"), run.ema.module.state_dict()  # which is what is evaluated
    assert saved.keys() == own.keys()
    assert all(torch.equal(own[key], tensor) for key, tensor in saved.items())
    assert any(not torch.equal(run.model.state_dict()[key], tensor) for key, tensor in saved.items())
    state = run.optimizer.state_dict()["state"]
    assert len(state) == len(list(run.model.parameters()))
    assert all(row["step"] == 4 and row["exp_avg"].any() for row in state.values())


def flip(file: Path) -> bytes:
    content = bytearray(file.read_bytes())
    content[-9] ^= 16
    return bytes(content)


@pytest.mark.parametrize("kind", DAMAGE)
def test_the_state_before_a_damaged_one(finished, copied, kind, capsys):
    name, content, reason = DAMAGE[kind]
    damage(copied / STATE / name, flip(copied / STATE / name) if content == "flip" else content)
    resume(copied)
    printed = capsys.readouterr().out
    assert f"The state {copied / STATE} is damaged ({reason}" in printed
    assert "the one before it is used." in printed
    assert "Resuming after 0 epochs and 0 batches" in printed
    assert_same_run(finished, copied)
    assert sorted(path.name for path in (copied / "state").iterdir()) == ["00000-0000000", "00001-0000000", "lock"]
    (copied / STATE / ".nfs0001").touch()  # what is not read may be there, too
    assert [find_damage(path) for path in RunFolder(copied).list_states()] == ["", ""]


def test_no_state_is_whole(copied):
    for state in RunFolder(copied).list_states():
        (state / ".metadata").write_bytes(b"")
    message = r"No state in .* \(00001-0000000: .metadata has changed.*00000-0000000: .*model.checkpoint=.*last.safetensors\."
    with pytest.raises(CheckpointError, match=message):
        resume(copied)
    assert len(RunFolder(copied).list_states()) == 2


def test_as_many_states_are_kept_as_the_recipe_says_for_colleagues_to_read(tmp_path, whole):
    """A state is saved every update, too: two an epoch, the second of them by the epoch itself."""
    before = os.umask(umask := 0o027)
    try:
        train(make_recipe(*RANDOM, "train.keep_states=3", "train.save_every=1"), tmp_path / "run")
    finally:
        os.umask(before)
    names = ["00001-0000000", "00001-0000002", "00002-0000000"]
    assert [path.name for path in RunFolder(tmp_path / "run").list_states()] == names
    assert_same_run(whole, tmp_path / "run")
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert len(files) > 15
    assert {path.stat().st_mode & 0o777 for path in files} == {0o666 & ~umask}


def test_a_state_is_on_the_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    """Of every state its files, then the folder; after the rename the folder of the states."""
    synced, published, fsync, rename = [], [], os.fsync, Path.rename

    def record(descriptor):
        synced.append(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def publish(path, target):
        if path.name == "writing":
            published.append((target.name, len(synced)))
            files = [each.stat().st_ino for each in path.iterdir()]
            assert sorted(synced[-len(files) - 1 : -1]) == sorted(files)
            assert synced[-1] == path.stat().st_ino
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", record)
    monkeypatch.setattr(Path, "rename", publish)
    train(make_recipe("train.epochs=1"), tmp_path / "run")
    assert [name for name, _ in published] == ["00000-0000000", "00001-0000000"]
    assert {synced[number] for _, number in published} == {(tmp_path / "run" / "state").stat().st_ino}


def test_what_a_killed_run_leaves_is_swept_away(finished, copied):
    state = copied / "state"
    written = [f"{path.name}.partial" for path in copied.iterdir() if path.is_file()]
    assert {"classes.json.partial", "last.safetensors.partial"} < set(written)
    written += ["best-b-00001-of-00003.safetensors.partial", "best.safetensors.index.json.partial"]
    for name in (".tmpab12XY", "plan.json.partial", *written):
        (copied / name).write_text("half")
    for name in ("writing", "deleted-00000-0000000", "replaced-00001-0000000"):
        (state / name).mkdir()
    for name in ("my-notes", "99999-copy"):  # neither states nor in the way
        (state / name).mkdir()
    for name in ("notes.partial", ".tmpfile"):  # somebody else's
        (copied / name).touch()
    resume(copied)
    names = {path.name for path in copied.iterdir()} ^ {path.name for path in finished.iterdir()}
    assert names == {"notes.partial", ".tmpfile"}
    left = {path.name for path in state.iterdir()} - {"my-notes", "99999-copy"}
    assert left == {"00000-0000000", "00001-0000000", "lock"}
    (state / "00001-0000000").rename(state / "replaced-00001-0000000")  # killed between two renames
    resume(copied)
    assert_same_run(finished, copied)
    assert (state / "00001-0000000").is_dir()


def test_metrics_beyond_the_newest_state_are_dropped(copied):
    (copied / "state" / "00009-0000000").touch()
    with (copied / "metrics.jsonl").open("a") as file:
        file.write('{"epoch": 2, "tr')
    assert resume(copied).folder == copied
    assert [record["epoch"] for record in read_records(copied)] == [1]


def test_a_deleted_folder_ends_the_run(tmp_path, monkeypatch):
    append = RunFolder.append_record

    def append_and_delete(folder, record):
        append(folder, record)
        shutil.rmtree(folder.path)

    monkeypatch.setattr(RunFolder, "append_record", append_and_delete)
    with pytest.raises(RevzooError, match="was deleted, moved or replaced while its run trained"):
        train(make_recipe(), tmp_path / "run")
    assert not (tmp_path / "run").exists()
