"""`revzoo eval`: the classes on the terminal, as a picture, as a list of errors and for programs."""

import csv
import json

import pytest

import revzoo


@pytest.fixture
def saved(tmp_path, image_folder):
    """Return the words that evaluate a saved model of two classes."""
    model = revzoo.create("rev_vit_digits", overrides=["stages.0.depth=1"], num_outputs=2)
    model.class_names = ("cat", "dog")
    model.save_pretrained(tmp_path / "saved")
    return "eval", tmp_path / "saved", f"data.root={image_folder}", "data.num_workers=0", "data.batch_size=3"


def test_classes_in_every_form(run, saved, image_folder, tmp_path, figures):
    printed = run(*saved, "--plot", tmp_path / "a.png", "--errors", tmp_path / "errors.csv")
    assert ("recall" in printed, "top-5" in printed) == (True, False)
    found = json.loads(run(*saved, "--json"))
    assert (found["images"], found["top5"]) == (8, 100.0)
    right = [found["confusion"][i][i] for i in range(2)]
    assert [(row["class"], row["examples"], row["recall"]) for row in found["classes"]] == [
        ("cat", 4, right[0] / 4), ("dog", 4, right[1] / 4),
    ]  # fmt: skip
    errors = list(csv.DictReader((tmp_path / "errors.csv").read_text().splitlines()))
    assert [{**row, "probability": float(row["probability"])} for row in errors] == found["errors"]
    assert len(errors) == 8 - sum(right) > 0
    assert all((image_folder / "val" / row["class"]).as_posix() in row["input"] for row in errors)
    (axes,) = figures[0].axes
    assert sum(int(text.get_text()) for text in axes.texts) == 8
    guessed = {
        json.loads(line)["input"]: json.loads(line)["predictions"][0]
        for line in run("predict", saved[1], image_folder / "val", "--json").splitlines()
    }
    for row in found["errors"]:  # of the example that it names
        assert guessed[row["input"]] == {"class": row["predicted"], "probability": pytest.approx(row["probability"], abs=1e-4)}


def test_many_classes_are_a_table_on_demand(run, saved, monkeypatch):
    monkeypatch.setattr("revzoo.commands.eval.FEW", 1)
    assert run(*saved).endswith("Each of the 2 classes: --per-class.\n")
    assert "recall" in run(*saved, "--per-class")


def test_a_language_model_has_no_classes(refused, tmp_path, tables, monkeypatch):
    monkeypatch.setattr("revzoo.training.evaluate_checkpoint.evaluate", None)  # it is refused before that
    model = revzoo.create("rev_roberta_mini", overrides=["stages.0.depth=1", "head={type: masked_lm}"])
    model.data_config = {"tokenizer": "bytes"}
    model.save_pretrained(tmp_path / "language")
    words = "eval", tmp_path / "language", "data.name=masked_lm", f"data.root={tables}"
    assert "which predicts bytes. Leave out --per-class" in refused(*words, "--per-class")


def test_what_is_not_read_is_in_no_class(run, saved, image_folder):
    broken = next((image_folder / "val" / "cat").iterdir())
    broken.write_bytes(b"no image")
    found = json.loads(run(*saved, "--json"))
    assert [row["examples"] for row in found["classes"]] == [3, 4]
    assert sum(map(sum, found["confusion"])) == found["images"] == 7
    assert str(broken) not in [row["input"] for row in found["errors"]]
