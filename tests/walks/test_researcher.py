"""A researcher with photographs and a table of texts, who reads docs/training.md."""

import csv
import json
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

PAGE = "docs/training.md"
SHORT = " train.epochs=1 schedule.warmup_epochs=0"  # settings that this page and that on sweeps show


@pytest.fixture(autouse=True)
def _optional_packages():
    for package in ("datasets", "tokenizers", "onnxscript", "onnxruntime", "tensorboard"):
        pytest.importorskip(package)


def run_python(user, heading: str, names: dict[str, object]) -> None:
    """Run the Python block below a heading of the page."""
    section = re.search(rf"^## {heading}\n(.*?)(^## |\Z)", user.open(PAGE), flags=re.M | re.S)[1]
    [block] = re.findall(r"^```python\n(.*?)^```$", section, flags=re.M | re.S)
    exec(compile(block, PAGE, "exec"), names)


def test_photographs(user, photos, capsys):
    _, scratch, tiny, tune = user.read(PAGE, "revzoo train images data.root=photos")
    settings = user.type(f"{scratch} --print-config")
    assert f"root: {photos}\n" in settings
    assert "  epochs: 30\n" in settings
    assert user.type(f"{scratch} --dry-run").endswith("Dry run: nothing was trained, and nothing is written.\n")
    assert not Path("runs").exists()

    user.type(scratch + SHORT)
    user.type(tiny + SHORT)
    printed = user.type(tune.replace("data.root=photos", "data.root=leaves") + SHORT)
    assert "the head is new, with random weights: " in printed
    assert json.loads(Path("tuned/classes.json").read_text()) == ["ash", "elm", "oak"]
    assert "top-1 " in user.type("revzoo eval tuned")

    evaluate, predict, to_csv, show, export = user.read(PAGE, "revzoo eval runs/images")
    assert "on 8 images" in user.type(evaluate)
    assert user.type(predict).count("photos/cat/") == 20
    rows = list(csv.DictReader(user.type(to_csv).splitlines()))
    assert len(rows) == 40
    assert {row["class"] for row in rows} <= {"cat", "dog"}
    lines = [json.loads(line) for line in user.type(to_csv.replace("--csv", "--json")).splitlines()]
    assert [line["input"] for line in lines] == [row["input"] for row in rows]
    assert "revnet_38" in user.type(show)
    assert "onnxruntime's outputs differ from the model's by " in user.type(export)
    assert Path("network.onnx").stat().st_size > 10_000
    capsys.readouterr()
    run_python(user, "Use what was trained", {})
    assert capsys.readouterr().out in ("cat\n", "dog\n")


def test_watching_stopping_and_going_on(user):
    [tracked] = user.read(PAGE, "revzoo train digits train.epochs=2 train.track=[tensorboard]")
    user.type(f"{tracked} --out my_run")
    assert list(Path("my_run/tensorboard").rglob("events.out.*"))
    changed, longer = user.read(PAGE, "revzoo train --resume my_run train.epochs=3 --accept-changes")
    assert "train.label_smoothing=0.1" in changed
    assert "epoch 3/3" in user.type(longer)
    assert len(Path("my_run/metrics.jsonl").read_text().splitlines()) == 3


def test_texts(user):
    run_python(user, "Texts", {})
    tokenizer, bpe, scratch, predict, typed = user.read(PAGE, "revzoo tokenizer reviews/train.csv")
    assert "model.overrides=[input.vocabulary=280,input.padding=1]" in user.type(tokenizer)
    assert "320 texts for training, 8 for testing, 2 classes" in user.type(bpe + SHORT)
    user.type(scratch + SHORT)
    assert user.type(predict).count("reviews/test.csv:") == 8
    assert "a dog, asleep" in user.type(typed)
    lines = user.type(f"{predict} --json").splitlines()
    assert {each["class"] for line in lines for each in json.loads(line)["predictions"]} == {"cat", "dog"}
