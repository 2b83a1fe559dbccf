"""The report of a model as tables and as a picture, and the table of its memory."""

import io
from dataclasses import replace

import pytest
from matplotlib.text import Text
from rich.console import Console

import revzoo
from revzoo.analysis.counting import report_model
from revzoo.analysis.report import ModelReport, TwinReport
from revzoo.display.figures import model as model_figure
from revzoo.display.figures.model import plot_model
from revzoo.display.tables.memory import MemoryTable
from revzoo.display.tables.model import tabulate_model
from revzoo.runtime.schedule import MODES

TINY = ["stages.0.depth=1"]


@pytest.fixture(scope="module")
def vit() -> ModelReport:
    return report_model(revzoo.create("rev_vit_digits", overrides=TINY, device="meta"), 2)


@pytest.fixture(scope="module")
def irevnet() -> ModelReport:
    return report_model(revzoo.create("irevnet_digits", overrides=[*TINY, "stages.1.depth=1"], device="meta"), 2)


def text_of(renderable: object) -> str:
    console = Console(width=180, record=True, file=io.StringIO())
    console.print(renderable)
    return console.export_text()


def test_every_question_is_answered(vit):
    weights = {"file": "rev_vit_digits.safetensors", "metric": {"top1": 98.873}, "command": "revzoo train digits"}
    twin = TwinReport("timm", "plain", parameters=2400, flops=2368, memory=vit.memory["store"])
    text = text_of(tabulate_model(replace(vit, weights=weights, twin=twin, expect={"parameters": 302794, "stream": None})))
    for answer in (
        "rev_vit_digits (rev_vit)",
        f"{vit.parameters:,}, ",
        "2, coupling additive",
        "What is kept for backward, batch of 2 images",
        "node: patch_embed",
        "stages.0",
        "MAC per image",
        "activations at the peak",
        "source",
        "rev_vit_digits.safetensors (top1 98.87; trained by: revzoo train",
        "timm plain: 2,400 parameters, 2.37 kMAC per image",
        "parameters: 302794, but it has ",
        " twin:",
    ):
        assert answer in text
    assert len([line for line in text.splitlines() if "node: " in line]) == 3
    assert not any(label in text for label in ("buffers", "optimizer", "CUDA"))  # which are zero in every mode


def test_a_bijection_keeps_nothing(irevnet):
    bijections = [part for part in irevnet.parts if part.kind == "bijection"]
    text = text_of(tabulate_model(irevnet))
    assert text.count("bijection: space_to_depth") == len(bijections) > 0
    assert text.count(" nothing ") == len(MODES) * len(bijections)


def test_a_network_on_one_tensor_has_no_streams(tmp_path, monkeypatch):
    layers = report_model(revzoo.create("layerwise_digits", overrides=["stages.1.depth=1"], device="meta"), 2)
    text = " ".join(text_of(tabulate_model(layers)).split())
    assert "reversible steps none: one tensor instead of two streams" in text
    assert "a layer with an inverse of its own keeps only what the inverse needs" in text
    assert not [word for word in ("0%", "then none", "pair of streams") if word in text]
    figures = []
    monkeypatch.setattr(model_figure, "save", lambda figure, path: figures.append(figure))
    plot_model(layers, tmp_path / "layers.png")
    (line,) = figures[0].axes[0].lines
    assert [*line.get_ydata()] == [0, 0]
    assert not [text for text in figures[0].findobj(Text) if "0 steps" in text.get_text()]


def test_texts_are_called_texts():
    text = text_of(tabulate_model(report_model(revzoo.create("rev_bert_mini", overrides=TINY, device="meta"))))
    assert "batch of 8 texts" in text
    assert "per text" in text
    assert "image" not in text


def test_the_picture_repeats(irevnet, tmp_path):
    for file in ("a.png", "b.png"):
        plot_model(irevnet, tmp_path / file)
    picture = (tmp_path / "a.png").read_bytes()
    assert picture == (tmp_path / "b.png").read_bytes()
    assert picture.startswith(b"\x89PNG")


def test_the_memory_table_marks_the_present_mode(vit):
    text = text_of(MemoryTable(vit.memory, "invert"))
    assert all(word in text for word in ("store ", "recompute ", " *", "weights", "gradients", "activations at the peak"))
    assert "The mode changes the memory of activations only." in " ".join(text.split())
    assert "*" not in text_of(MemoryTable(vit.memory, None))
