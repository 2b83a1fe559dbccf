"""`revzoo show`: text, JSON, picture."""

import json

import pytest

import revzoo
from revzoo.analysis.counting import report_model


@pytest.fixture
def model() -> revzoo.Model:
    return revzoo.create("rev_vit_digits", overrides=["stages.0.depth=1"], device="meta")


@pytest.fixture
def file(tmp_path, model) -> str:
    (tmp_path / "tiny.yaml").write_text(model.spec.to_yaml())
    return str(tmp_path / "tiny.yaml")


def test_json_is_the_report_and_nothing_else(file, model, run):
    printed = json.loads(run("show", file, "--json", "--batch", 3))
    report = report_model(model, 3)
    assert printed == json.loads(json.dumps(report.to_dict()))


def test_overrides_follow_the_name(model, run):
    printed = json.loads(run("show", "rev_vit_digits", "stages.0.depth=1", "num_classes=7", "--json", "--batch", 3))
    assert (printed["outputs"], printed["steps"]) == (7, 2)


def test_steps_cut_into_tiles_take_less_inside_and_the_table_says_how_they_are_cut(file, run):
    whole, cut = (json.loads(run("show", file, "--json", "--batch", 8, *tiles)) for tiles in ([], ["--tiles", 4]))
    assert (whole["tiles"], cut["tiles"]) == ([], [4])
    model = revzoo.create("rev_vit_digits", overrides=["stages.0.depth=1"], tiles=4, device="meta")
    assert cut["memory"]["invert"] == revzoo.measure_memory(model, model.example_input(8)).to_dict()
    assert cut["memory"]["invert"]["activation_bytes"] < whole["memory"]["invert"]["activation_bytes"]
    assert "2, coupling additive, cut into 4 tiles" in run("show", file, "--batch", 8, "--tiles", 4)


def test_tiles_of_steps_that_mix_examples_are_refused_by_name(refused):
    assert "stages.0.blocks.0.f cannot be cut into tiles" in refused("show", "revnet_digits", "--tiles", 4)


def test_weights_ship_for_this_very_spec(run):
    shipped = json.loads(run("show", "rev_vit_digits", "--json", "--batch", 2))["weights"]
    assert (shipped["file"], shipped["command"]) == ("rev_vit_digits.safetensors", "revzoo train digits")
    assert json.loads(run("show", "rev_vit_digits", "stages.0.depth=1", "--json", "--batch", 2))["weights"] is None


def test_the_picture_comes_with_the_text(file, run, tmp_path):
    text = run("show", file, "--batch", 2, "--plot", tmp_path / "a.png")
    assert "What is kept for backward, batch of 2 images" in text
    assert (tmp_path / "a.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("path", "message"),
    [("nowhere/a.png", "There is no folder "), ("a.pdf", "Use --plot network.png"), ("folder.png", "Name a file.")],
)
def test_a_picture_that_cannot_be_written_is_refused_before_anything_is_measured(path, message, refused, tmp_path, monkeypatch):
    (tmp_path / "folder.png").mkdir()
    monkeypatch.setattr("revzoo.model.create.create", None)
    assert message in refused("show", "rev_vit_digits", "--plot", tmp_path / path)
    assert [file.name for file in tmp_path.iterdir()] == ["folder.png"]
