"""Runs that end early, runs on part of the data, and runs with images that cannot be read."""

import json
import shutil
from pathlib import Path

import pytest
from accelerate import Accelerator

from revzoo.data.loading import load_data
from revzoo.errors import InputError
from revzoo.spec.schema import ImageInput
from revzoo.training.evaluate_checkpoint import evaluate_checkpoint
from revzoo.training.loop import resume, train
from revzoo.training.setup import build_run
from tests.training.runs import RANDOM, assert_same_run, interrupted, make_image_recipe, make_recipe, read_records
from zoo_cli import main

# Two updates an epoch; the third is in the middle of the second epoch.
LIMITED = [*RANDOM, "train.epochs=5", "train.max_updates=3"]


@pytest.fixture(scope="module")
def limited(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("limited") / "run"
    train(make_recipe(*LIMITED), folder)
    return folder


def test_training_ends_after_max_updates(limited):
    records = read_records(limited)
    assert [(record["epoch"], record["updates"]) for record in records] == [(1, 2), (2, 3)]
    assert records[0]["lr"] > records[1]["lr"] == pytest.approx(1e-5)  # schedule.min_lr
    assert (limited / "last.safetensors").is_file()
    assert resume(limited).best_epoch  # nothing is left to do
    assert read_records(limited) == records
    with pytest.raises(InputError, match="3 updates are done. Use train.max_updates=3 or more"):
        resume(limited, ["train.max_updates=2"])


@pytest.mark.parametrize("polls", [5, 6])  # after the last update, which is before the end of its epoch; in its evaluation
def test_a_limited_run_resumes_to_the_same_end(limited, tmp_path, polls):
    with interrupted(polls):
        train(make_recipe(*LIMITED), tmp_path / "run")
    state = json.loads((max((tmp_path / "run/state").glob("0*")) / "progress.json").read_text())
    assert (state["epoch"], state["batch"], state["updates"]) == (1, 2, 3)
    resume(tmp_path / "run")
    assert_same_run(limited, tmp_path / "run")


def test_a_limit_takes_the_same_examples_everywhere():
    """Of every class, whatever the number of processes; another seed takes others."""
    options, input = make_recipe("data.limit=40", "data.batch_size=8").data, ImageInput("image", 1, (8, 8))
    one, two = (load_data(options, input, 0, processes) for processes in (1, 2))
    assert (one.num_train, one.num_test, len(one.train), len(one.test)) == (40, 40, 5, 5)
    assert "data.limit=40: 40 of 1,442 training and 40 of 355 test images, drawn by train.seed=0" in one.notes
    assert one.train.dataset.indices == two.train.dataset.indices != load_data(options, input, 1).train.dataset.indices
    labels = [label for _, batch in one.train for label in batch.tolist()]
    assert sorted(labels) == sorted(map(int, one.train_labels))
    assert len(set(labels)) > 5
    assert one.describe_examples() == load_data(make_recipe().data, input, 0).describe_examples()


def test_a_run_on_part_of_the_data_is_evaluated_on_all(tmp_path):
    recipe = make_recipe("data.limit=40", "data.batch_size=8", "train.epochs=1", "mixup={mixup_alpha: 0.8}")
    train(recipe, tmp_path / "run")
    assert evaluate_checkpoint(tmp_path / "run").count == 355
    assert evaluate_checkpoint(tmp_path / "run", ["data.limit=40", "data.batch_size=33"]).count == 40  # pairs are for mixup
    shutil.rmtree(tmp_path / "run/state/00001-0000000")
    resume(tmp_path / "run")
    with pytest.raises(InputError, match="cannot change data.limit"):
        resume(tmp_path / "run", ["data.limit=50"])


def test_a_smoke_run_leaves_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    assert main(["train", "digits", "--smoke", "model.schedule=store"]) == 0
    assert "It works" in capsys.readouterr().out
    assert [*tmp_path.iterdir()] == [tmp_path / "temporary"]
    assert not [*(tmp_path / "temporary").iterdir()]


@pytest.mark.parametrize(
    ("overrides", "note"),
    [
        (["train.max_updates=3", "schedule.sched=linear"], "warmup_epochs=1 lasts 3 of the 3 updates, which learn little"),
        (["train.epochs=12", "schedule.warmup_epochs=7"], "in a run this short use schedule.warmup_epochs=1"),
        (["train.epochs=2", "schedule.warmup_epochs=1"], None),
    ],
)
def test_a_warm_up_of_most_of_the_run_is_said(tmp_path, overrides, note):
    run = build_run(make_recipe(*overrides), tmp_path, Accelerator(), resumed=False)
    said = [each for each in run.notes if "warmup" in each]
    assert said == [] if note is None else note in said[0]


def test_a_run_goes_on_without_images_that_cannot_be_read(image_folder, tmp_path, capsys):
    """They are named once, and the resumed run is the uninterrupted one."""
    broken = [image_folder / "train/cat/2.png", image_folder / "val/dog/0.png"]
    for path in broken:
        path.write_bytes(path.read_bytes()[:60])
    recipe = make_image_recipe(image_folder, "train.epochs=2")
    train(recipe, tmp_path / "whole")
    output = capsys.readouterr().out
    assert f"training images that cannot be read, others take their places: 1 ({broken[0]})" in output
    assert output.count(f"test images that cannot be read, left out: 1 ({broken[1]})") == 1
    assert (tmp_path / "whole/log/unreadable.txt").read_text().splitlines() == list(map(str, broken))
    with interrupted(1):
        train(recipe, tmp_path / "run")
    resume(tmp_path / "run")
    assert_same_run(tmp_path / "whole", tmp_path / "run")
    scores = evaluate_checkpoint(tmp_path / "run")
    assert scores.count == 7
    assert f"test images that cannot be read, left out: 1 ({broken[1]})" in scores.notes
