"""`revzoo predict` and `revzoo export --onnx`, and what every command says about the folder of a run."""

import csv
import json
import os
from io import BytesIO, TextIOWrapper

import numpy as np
import pytest
import torch
from PIL import Image

import revzoo
import zoo_cli
from revzoo.conversion.onnx_file import export_onnx
from revzoo.errors import ConversionError


@pytest.fixture
def zero(tmp_path):
    """A picture of the digit 0."""
    rows = ["00012100", "00277720", "02720270", "04700470", "04700470", "03700570", "00777700", "00022100"]
    pixels = np.array([[int(pixel) for pixel in row] for row in rows], np.uint8) * 34
    Image.fromarray(pixels).save(tmp_path / "zero.png")
    return tmp_path / "zero.png"


def test_predictions_in_every_form(run, zero):
    table = run("predict", "rev_vit_digits", zero, "--top", 2)
    assert "zero.png" in table
    [line] = run("predict", "rev_vit_digits", zero, "--json").splitlines()
    found = json.loads(line)
    assert found["input"] == str(zero)
    assert len(found["predictions"]) == 5
    assert found["predictions"][0]["class"] == "0"
    probabilities = [each["probability"] for each in found["predictions"]]
    assert probabilities == sorted(probabilities, reverse=True)
    head, *rows = csv.reader(run("predict", "rev_vit_digits", zero, zero, "--csv", "--top", 1).splitlines())
    assert head == ["input", "rank", "class", "probability"]
    assert [row[:3] for row in rows] == [[str(zero), "1", "0"]] * 2
    assert float(rows[0][3]) == pytest.approx(probabilities[0], abs=1e-5)


def test_a_name_that_is_not_utf8_is_printed_with_escapes(run, zero):
    other = os.path.join(os.fsencode(zero.parent), b"\xe9.png")
    os.rename(zero, other)
    [line] = run("predict", "rev_vit_digits", os.fsdecode(other), "--json").splitlines()
    assert json.loads(line)["input"] == f"{zero.parent}/\\xe9.png"


@pytest.mark.parametrize("form", [["--json"], ["--top", "1"]])
def test_images_that_cannot_be_read_are_left_out_and_named_at_the_end(form, zero, tmp_path, capsys):
    folder = tmp_path / "photos"
    folder.mkdir()
    for name in ("a.png", "c.png"):
        (folder / name).write_bytes(zero.read_bytes())
    for name in ("b.png", "d.png"):
        (folder / name).write_bytes(zero.read_bytes()[:40])
    assert zoo_cli.main(["predict", "rev_vit_digits", str(folder), *form, "--batch", "1"]) == 2
    out, err = capsys.readouterr()
    assert [name for name in "abcd" if f"{name}.png" in out] == ["a", "c"]
    assert [line.partition(" cannot")[0] for line in err.splitlines()] == [
        f"revzoo: The image {folder}/{name}.png" for name in "bd"
    ]


def test_files_that_cannot_be_used_are_named_before_anything_is_predicted(refused, zero, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "table.csv").write_text("text\na cat\n")
    others = {
        "no.png": "There is no file no.png.",
        tmp_path / "empty": "There are no images in ",
        tmp_path / "table.csv": "rev_vit",
    }
    for other, message in others.items():
        assert refused("predict", "rev_vit_digits", zero, other, "--json").startswith(message)


def test_texts_come_from_tables_and_lines(run, tmp_path, tables):
    model = revzoo.create("rev_bert_mini", overrides=["stages.0.depth=1"])
    model.class_names, model.data_config = ("cat", "dog"), {"tokenizer": "bytes"}
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "lines.txt").write_text("a cat\n\na dog\n")
    (tmp_path / "other.csv").write_text("review\na bird\n")
    lines = run("predict", tmp_path / "model", tmp_path / "lines.txt", tables / "test.jsonl", "--json").splitlines()
    assert [json.loads(line)["input"] for line in lines] == [
        *(f"{tmp_path}/lines.txt:{row}" for row in (1, 3)), *(f"{tables}/test.jsonl:{row}" for row in (1, 2, 3)),
    ]  # fmt: skip
    assert {each["class"] for line in lines for each in json.loads(line)["predictions"]} == {"cat", "dog"}
    assert run("predict", tmp_path / "model", tmp_path / "other.csv", "--column", "review", "--csv").count("\n") == 3


def test_texts_are_typed_and_piped(run, refused, tmp_path, monkeypatch):
    model = revzoo.create("rev_bert_mini", overrides=["stages.0.depth=1"])
    model.class_names, model.data_config = ("cat", "dog"), {"tokenizer": "bytes"}
    model.save_pretrained(tmp_path / "model")
    monkeypatch.setattr("sys.stdin", TextIOWrapper(BytesIO("a cat\n\nein Vögelchen\n".encode())))
    lines = run("predict", tmp_path / "model", "-", "--text", "a cat", "--json").splitlines()
    typed, first, third = map(json.loads, lines)
    assert [each["input"] for each in (typed, first, third)] == ["a cat", "-:1", "-:3"]
    assert typed["predictions"][0]["class"] == first["predictions"][0]["class"]
    assert refused("predict", tmp_path / "model", "a dog").endswith("For a text itself type --text 'a dog'.\n")
    assert "takes texts, and ' '" in refused("predict", tmp_path / "model", "--text", " ")
    assert "takes images, and the standard input (-) is texts" in refused("predict", "rev_vit_digits", "-")


@pytest.mark.parametrize(("size", "mode", "noted"), [((180, 90), "RGB", True), ((32, 64), "L", False), ((1, 3), "L", True)])
def test_an_image_far_from_what_the_network_takes_is_noted(size, mode, noted, tmp_path, capsys):
    Image.new(mode, size).save(tmp_path / "a.png")
    assert zoo_cli.main(["predict", "rev_vit_digits", str(tmp_path / "a.png"), "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["input"].endswith("a.png")
    kind = "in colour" if mode == "RGB" else "in grey"
    assert (f"a.png has {size[0]}x{size[1]} pixels {kind}, and the network takes 8x8 in grey" in err) == noted == bool(err)


def test_what_cannot_be_predicted(refused, zero, tmp_path):
    assert "rev_vit_s has no weights" in refused("predict", "rev_vit_s", zero)
    (tmp_path / "photo.BMP").touch()
    assert "The model comes first" in refused("predict", tmp_path / "photo.BMP", zero)
    model = revzoo.create("rev_roberta_mini", overrides=["stages.0.depth=1", "head={type: masked_lm}"])
    model.save_pretrained(tmp_path / "language")
    assert "masked_lm, which predicts no classes" in refused("predict", tmp_path / "language", zero)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a run, as training leaves it."""
    folder = tmp_path_factory.mktemp("runs") / "digits"
    small = ["train.epochs=1", "schedule.warmup_epochs=0", "data.batch_size=480", "model.overrides=[stages.0.depth=1]"]
    assert zoo_cli.main(["train", "digits", *small, "--out", str(folder)]) == 0
    return folder


@pytest.mark.parametrize(
    "command",
    ["show RUN", "eval RUN", "eval RUN/last.safetensors", "verify RUN", "plan RUN --meta --budget 64MiB", "profile RUN --meta",
     "predict RUN ZERO", "predict RUN/best.safetensors ZERO", "numerics RUN"],
)  # fmt: skip
def test_every_command_takes_the_folder_of_a_run(trained, zero, command, capsys):
    words = command.replace("RUN", str(trained)).replace("ZERO", str(zero)).split()
    assert zoo_cli.main(words) == 0
    assert capsys.readouterr().out


def test_shipped_weights_are_evaluated_by_their_name(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rev_vit_digits").mkdir()  # ./rev_vit_digits would name it
    assert "The index says top-1 98.87 %: the same." in run("eval", "rev_vit_digits")


@pytest.mark.slow
def test_onnxruntime_computes_the_same(trained, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    assert zoo_cli.main(["export", str(trained), "--onnx", str(tmp_path / "a.onnx")]) == 0
    session = onnxruntime.InferenceSession(tmp_path / "a.onnx", providers=["CPUExecutionProvider"])
    assert json.loads(session.get_modelmeta().custom_metadata_map["revzoo.classes"]) == list("0123456789")


@pytest.mark.slow
def test_a_file_that_computes_something_else_is_not_left(tmp_path):
    pytest.importorskip("onnxruntime")
    model = revzoo.create("rev_vit_digits", overrides=["stages.0.depth=1"]).eval()
    torch.nn.init.constant_(model.head.linear.bias, torch.nan)
    (tmp_path / "a.onnx").write_text("of before")
    with pytest.raises(ConversionError, match="onnxruntime computes something else than rev_vit_digits: off by nan"):
        export_onnx(model, tmp_path / "a.onnx")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a.onnx", "of before")]


def test_what_cannot_be_exported(refused, trained, tmp_path):
    assert refused("export", trained).startswith("Name the file to write: --onnx network.onnx")
    assert refused("export", "rev_vit_s", "--onnx", tmp_path / "a.onnx").startswith("rev_vit_s has no weights.")
    for name in ("a.pt", "missing/a.onnx"):
        assert "in a folder that exists. Received: " in refused("export", "rev_vit_digits", "--onnx", tmp_path / name)
