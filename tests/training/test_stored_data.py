"""Runs on tars and data sets of Hugging Face: they are those on a folder of the same images, resumed and evaluated alike."""

import pytest

from revzoo.training.evaluate_checkpoint import evaluate_checkpoint
from revzoo.training.loop import resume, train
from tests.training.runs import assert_same_run, interrupted, make_recipe, read_records

IMAGES = ["data.batch_size=2", "data.shift=0", "train.epochs=1", "mixup={mixup_alpha: 0.8}"]


@pytest.mark.parametrize("name", ["wds", "hfds"])
def test_a_run_is_that_on_a_folder(name, image_folder, tmp_path, request):
    """One that was interrupted in the middle of an epoch."""
    root = request.getfixturevalue({"wds": "tar_folder", "hfds": "saved_dataset"}[name])
    train(make_recipe(*IMAGES, "data.name=folder", f"data.root={image_folder}"), tmp_path / "folder")
    with interrupted(2):
        train(make_recipe(*IMAGES, f"data.name={name}", f"data.root={root}"), tmp_path / "run")
    elsewhere = root.rename(tmp_path / "elsewhere")
    resume(tmp_path / "run", [f"data.root={elsewhere}"])
    assert_same_run(tmp_path / "folder", tmp_path / "run")
    scores = evaluate_checkpoint(tmp_path / "folder" / "last.safetensors", [f"data.name={name}", f"data.root={elsewhere}"])
    assert scores.count == 8
    assert scores.loss == pytest.approx(read_records(tmp_path / "run")[-1]["loss"], rel=1e-5)
