"""The recipe `finetune`: zoo models, runs and saved folders alike, with a head for the data's classes."""

import json

import pytest
import torch
from PIL import Image

import revzoo
from revzoo.checkpoint.files import read_tensors
from revzoo.training.evaluate_checkpoint import evaluate_checkpoint
from revzoo.training.loop import train
from revzoo.training.recipe import load_recipe

STILL = ["train.epochs=1", "schedule={sched: constant}", "optimizer={opt: sgd, lr: 1e-12}", "data.num_workers=0"]
STILL += ["data.batch_size=8"]


@pytest.fixture(scope="module")
def animals(tmp_path_factory):
    """Four classes, two of them in a folder of their own too, without images for validation."""
    folder = tmp_path_factory.mktemp("animals")
    for place, labels in (("four", "abcd"), ("two", "ab"), ("others", "xy")):
        for label in labels:
            (folder / place / label).mkdir(parents=True)
            for i in range(5):
                Image.effect_noise((8, 8), 50 + 10 * i).save(folder / place / label / f"{i}.png")
    return folder


@pytest.fixture
def tune(animals, tmp_path, capsys):
    """Return a function that fine-tunes a model without changing its weights, and returns its folder and what was printed."""

    def tune(model, data, out, *overrides):
        typed = [f"model={model}", f"data.root={animals / data}", *STILL, *overrides]
        train(load_recipe("finetune", typed), tmp_path / out)
        return tmp_path / out, capsys.readouterr().out

    return tune


def is_same(before, tensor):
    return before is not None and before.shape == tensor.shape and torch.allclose(before, tensor, rtol=0, atol=1e-6)


def find_changed(before, folder):
    """Return the keys of the weights that a run does not have from its start."""
    after = read_tensors(folder / "last.safetensors")
    return {key for key, tensor in after.items() if not is_same(before.get(key), tensor)}


HEAD = {"head.linear.weight", "head.linear.bias"}


def test_a_zoo_model_then_its_run_then_another_folder(tune):
    """Each starts from the weights of the one before, with a new head where the classes are others."""
    shipped = revzoo.create("rev_vit_digits", pretrained=True).state_dict()
    first, printed = tune("rev_vit_digits", "four", "first")
    assert "Note: the head is new, with random weights: it has 4 outputs, and had 10." in printed
    assert find_changed(shipped, first) == HEAD
    assert revzoo.create(first).class_names == tuple("abcd")
    assert json.loads((first / "classes.json").read_text()) == list("abcd")

    weights = read_tensors(first / "best.safetensors")
    second, printed = tune(first, "two", "second")
    assert "the head is new, with random weights: it has 2 outputs, and had 4." in printed
    assert find_changed(weights, second) == HEAD

    weights = read_tensors(second / "best.safetensors")
    third, printed = tune(second, "others", "third")
    assert "the head is new, with random weights: its classes are x, y, and were a, b." in printed
    assert find_changed(weights, third) == HEAD
    assert revzoo.create(third).class_names == ("x", "y")

    again, printed = tune(second, "two", "again")  # the same classes: their head goes on
    assert "the head" not in printed
    assert find_changed(weights, again) == set()
    assert evaluate_checkpoint(again).count == 2


def test_weights_in_a_file_for_other_classes(tune, tmp_path):
    """The head is the file's where the classes are, and a new one otherwise, whatever number the model's spec has."""
    model = revzoo.create("rev_vit_digits", num_outputs=4)
    weights, file = model.state_dict(), tmp_path / "weights.pt"
    torch.save({"model": {f"module.{key}": tensor for key, tensor in weights.items()}}, file)
    same, printed = tune("rev_vit_digits", "four", "same", f"model.checkpoint={file}")
    assert find_changed(weights, same) == set()
    assert "the head" not in printed
    other, printed = tune("rev_vit_digits", "two", "other", f"model.checkpoint={file}")
    assert find_changed(weights, other) == HEAD
    assert "the head is new, with random weights: it has 2 outputs, and had 4." in printed


def test_recipes_for_ones_own_data(animals, tables, tmp_path, capsys):
    """`images` takes the size and the channels of the model; `texts` reads bytes. Both predict afterwards."""
    short = ["train.epochs=1", "schedule.warmup_epochs=0", "data.batch_size=4"]
    images = [f"data.root={animals / 'four'}", "data.num_workers=0", *short]
    recipe = load_recipe("images", [*images, "model=rev_vit_digits", "model.overrides=[stages.0.depth=1]"])
    train(recipe, tmp_path / "images")
    assert "16 images for training, 4 for testing, 4 classes" in capsys.readouterr().out
    assert revzoo.create(tmp_path / "images").spec.input == revzoo.load_spec("rev_vit_digits").input
    train(load_recipe("texts", [f"data.root={tables}", *short]), tmp_path / "texts")
    model = revzoo.create(tmp_path / "texts")
    assert (model.class_names, model.data_config) == (("cat", "dog"), {"tokenizer": "bytes"})
    assert evaluate_checkpoint(tmp_path / "texts").count == 3


def test_a_run_keeps_its_tokenizer(tables, tokenizer, tmp_path):
    """The copy in the folder is read where the original is gone."""
    small = ["model.overrides=[input.vocabulary=280,input.padding=1,stages.0.depth=1]", "data.batch_size=4", "train.epochs=1"]
    texts = [f"data.root={tables}", f"data.text.tokenizer={tokenizer}", "schedule.warmup_epochs=0"]
    train(load_recipe("texts", [*texts, *small]), tmp_path / "run")
    copy = tmp_path / "run" / "tokenizer.json"
    assert copy.read_text() == tokenizer.read_text()
    tokenizer.unlink()
    model = revzoo.create(tmp_path / "run")
    assert model.data_config == {"tokenizer": str(copy)}
    assert revzoo.transform(model)("cat").shape[0] >= 3
    assert evaluate_checkpoint(tmp_path / "run").count == 3
