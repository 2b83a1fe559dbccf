"""The report of a model as tables and as a picture, and the table of its memory."""

import io
import struct
from dataclasses import replace

import pytest
from matplotlib.text import Text
from rich.console import Console

import revzoo
from revzoo.analysis.counting import report_model
from revzoo.analysis.report import MemoryReport, ModelReport, TwinReport
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


@pytest.fixture(scope="module")
def bert() -> ModelReport:
    return report_model(revzoo.create("rev_bert_mini", overrides=TINY, device="meta"))


@pytest.fixture(scope="module")
def layers() -> ModelReport:
    return report_model(revzoo.create("layerwise_digits", overrides=["stages.1.depth=1"], device="meta"), 2)


def text_of(renderable: object) -> str:
    console = Console(width=180, record=True, file=io.StringIO())
    console.print(renderable)
    return console.export_text()


def test_every_question_is_answered(vit):
    weights = {"file": "rev_vit_digits.safetensors", "metric": {"top1": 98.873}, "command": "revzoo train digits"}
    text = text_of(tabulate_model(replace(vit, weights=weights)))
    for answer in (
        "rev_vit_digits (rev_vit)",
        f"{vit.parameters:,}, ",
        "2, coupling additive",
        "What is kept for backward, batch of 2 images",
        "node: patch_embed",
        "stages.0",
        "FLOP per image, a multiply-add counted once",
        "activations at the peak",
        "source",
        "rev_vit_digits.safetensors (top1 98.87; trained by: revzoo train",
    ):
        assert answer in text
    assert len([line for line in text.splitlines() if "node: " in line]) == 3


def test_a_bijection_keeps_nothing(irevnet):
    bijections = [part for part in irevnet.parts if part.kind == "bijection"]
    lines = [line for line in text_of(tabulate_model(irevnet)).splitlines() if "bijection: space_to_depth" in line]
    assert len(lines) == len(bijections) > 0
    assert all(line.count("nothing") == len(MODES) for line in lines)


def test_a_network_on_one_tensor_has_no_streams(layers, tmp_path, monkeypatch):
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


def test_bytes_per_pixel_of_every_stage(vit):
    pixels = vit.pixels
    text = text_of(tabulate_model(vit))
    assert f"Peak: {pixels.bytes_per_pixel:.1f} bytes per pixel of 2 images of 8 x 8" in " ".join(text.split())
    lines = [line for line in text.splitlines() if " of stem " in line or " of stages.0.blocks" in line or " of head " in line]
    assert [line.split()[1] for line in lines] == ["stem", "stages.0", "head"]
    assert ["*" in line for line in lines] == [False, True, False]
    assert f"{pixels.stages['stages.0'].hidden_bytes / (2 * 8 * 8):.1f}" in lines[1]
    twin = TwinReport("timm", "vit", 1, 1, vit.memory["store"], replace(pixels, counted_bytes=128 * 4321))
    assert "Of the twin: 4321.0 bytes." in " ".join(text_of(tabulate_model(replace(vit, twin=twin))).split())


def test_names_are_no_markup(vit):
    assert "[/red] ([bold])" in text_of(tabulate_model(replace(vit, name="[/red]", family="[bold]")))


def test_the_twin_has_a_column(vit):
    twin = TwinReport("timm", "plain", parameters=2400, flops=2368, memory=vit.memory["store"])
    text = text_of(tabulate_model(replace(vit, twin=twin)))
    assert "timm plain: 2,400 parameters, 2.37 kFLOP per image" in text
    (heading,) = (line for line in text.splitlines() if "twin: plain" in line)
    assert "recompute" in heading


@pytest.mark.parametrize("name", ["bert", "irevnet"])
def test_the_picture_is_as_wide_as_its_parts(name, tmp_path, request):
    report = request.getfixturevalue(name)
    plot_model(report, tmp_path / "model.png")
    picture = (tmp_path / "model.png").read_bytes()
    assert picture[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", picture[16:24])
    inches = {"node": 1.35, "stage": 1.75, "bijection": 1.3}
    assert width == pytest.approx(120 * max(8.5, 1.3 + sum(inches[part.kind] for part in report.parts)), abs=1)
    assert height == 792


def test_the_memory_table_marks_the_present_mode(vit):
    text = text_of(MemoryTable(vit.memory, "invert"))
    assert all(word in text for word in ("store ", "recompute ", "invert *", "weights", "gradients", "activations at the peak"))
    assert "The mode changes the memory of activations only." in text
    assert "*" not in text_of(MemoryTable(vit.memory, None))


def test_rows_that_are_zero_in_every_mode_are_left_out():
    report = MemoryReport(
        8, 4, 2, weight_bytes=2, buffer_bytes=0, gradient_bytes=2, optimizer_bytes=0, update_bytes=0, batch_bytes=1
    )
    text = text_of(MemoryTable({"store": report}))
    assert "weights" in text
    assert not any(label in text for label in ("buffers", "optimizer", "CUDA"))
