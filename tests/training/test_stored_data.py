"""Runs on tars and data sets of Hugging Face: they are those on a folder of the same images, resumed and evaluated alike."""

import shutil

import pytest

from revzoo.errors import InputError
from revzoo.training.evaluation import evaluate_checkpoint
from revzoo.training.interrupt import Interrupted, StopSignal
from revzoo.training.loop import resume, train

IMAGES = ["data.batch_size=2", "data.shift=0", "train.save_every=1", "mixup={mixup_alpha: 0.8}"]


@pytest.mark.parametrize("name", ["wds", "hfds"])
def test_a_run_is_that_on_a_folder(name, recipe, image_folder, tmp_path, monkeypatch, request, assert_same_run, read_records):
    """One that was interrupted in the middle of an epoch."""
    root = request.getfixturevalue({"wds": "tar_folder", "hfds": "saved_dataset"}[name])
    train(recipe(*IMAGES, "data.name=folder", f"data.root={image_folder}"), tmp_path / "folder")
    signals = iter([0, 0, 0, 0, 0, 15])  # in the second epoch
    with monkeypatch.context() as patch:
        patch.setattr(StopSignal, "poll", lambda self: next(signals))
        with pytest.raises(Interrupted):
            train(recipe(*IMAGES, f"data.name={name}", f"data.root={root}"), tmp_path / "run")
    resume(tmp_path / "run")
    assert_same_run(tmp_path / "folder", tmp_path / "run")
    scores = evaluate_checkpoint(tmp_path / "folder" / "last.safetensors", [f"data.name={name}", f"data.root={root}"])
    assert scores.count == 8
    assert scores.loss == pytest.approx(read_records(tmp_path / "run")[-1]["loss"], rel=1e-5)
    elsewhere = shutil.copytree(root, tmp_path / "elsewhere")
    resume(tmp_path / "run", [f"data.root={elsewhere}"])


def test_other_tars_are_refused(recipe, tar_folder, tmp_path):
    train(recipe(*IMAGES, "data.name=wds", f"data.root={tar_folder}", "train.epochs=1"), tmp_path / "run")
    (tar_folder / "animals-train-0002.tar").unlink()
    with pytest.raises(InputError, match="training examples: 8 at the start, 6 now"):
        resume(tmp_path / "run", accept_changes=True)
