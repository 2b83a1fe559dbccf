"""Runs on tars and data sets of Hugging Face: they are those on a folder of the same images, resumed and evaluated alike."""

import json

import pytest

from revzoo.errors import SpecError
from revzoo.training.evaluation import evaluate_checkpoint
from revzoo.training.loop import resume, train
from revzoo.training.recipe import load_recipe
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


def test_texts_of_a_data_set(tables, tokenizer, tmp_path):
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(text=datasets.Value("string"), label=datasets.ClassLabel(names=["dog", "cat"]))
    rows = datasets.Dataset.from_dict({"text": ["a cat purrs", "a dog"] * 8, "label": ["cat", "dog"] * 8}, features)
    datasets.DatasetDict(train=rows, test=rows).save_to_disk(tmp_path / "texts")
    small = (
        "model.overrides=[stem.width=8,stages.0.width=8,stages.0.depth=1,block.f.heads=2,input.vocabulary=280,input.padding=1]"
    )
    data = ["data.name=hfds", f"data.root={tmp_path / 'texts'}", f"data.text.tokenizer={tokenizer}", "data.batch_size=4"]
    run = train(load_recipe("text_bert", [*data, small, "train.epochs=1", "schedule.warmup_epochs=0"]), tmp_path / "run")
    assert json.loads((run.folder / "classes.json").read_text()) == ["dog", "cat"]
    assert evaluate_checkpoint(run.folder).count == 16
    with pytest.raises(SpecError, match="mixup: found .* allowed: null, for texts: ids cannot be mixed"):
        train(load_recipe("text_bert", [*data, small, "mixup={mixup_alpha: 0.8}"]), tmp_path / "mixed")
