"""What `revzoo show` says: every part, what it keeps, and that the parts add up; as text, JSON and picture."""

import io
import json
import struct
from functools import cache

import pytest
import torch
from rich.console import Console
from torch import nn

import revzoo
import zoo_cli
from revzoo.analysis.flops import count_flops
from revzoo.analysis.report import ModelReport, report_model
from revzoo.display.figures.model import plot_model
from revzoo.display.tables.memory import tabulate_memory
from revzoo.display.tables.model import show_model
from revzoo.format import format_count, format_flops
from revzoo.runtime.schedule import MODES

SMALL = ["revnet_digits", "irevnet_digits", "rev_bert_mini"]
TINY = ["stages.0.depth=1"]


@cache
def shipped(name: str) -> ModelReport:
    return report_model(revzoo.create(name, device="meta"))


@pytest.fixture
def tiny() -> revzoo.Model:
    return revzoo.create("rev_vit_digits", overrides=TINY, device="meta")


def text_of(found: ModelReport) -> str:
    console = Console(width=180, record=True, file=io.StringIO())
    console.print(show_model(found))
    return console.export_text()


def with_twin(monkeypatch, built) -> None:
    monkeypatch.setattr("revzoo.analysis.report.build_twin", lambda spec: built)


def twin_of(name: str) -> list[str]:
    return ["twin={library: timm, name: " + name + "}"]


@pytest.mark.parametrize("name", SMALL)
def test_parts_add_up(name):
    found = shipped(name)
    for mode in MODES:
        kept = sum(part.kept_bytes[mode] for part in found.parts)
        assert kept + 4 == found.memory[mode].after_forward_bytes  # 4: the loss
    assert found.parameters == sum(part.parameters for part in found.parts) == found.expect["parameters"]
    assert found.steps == sum(part.steps for part in found.parts) == found.expect["reversible_steps"]


def test_measuring_together_is_measuring_alone(tiny):
    found, batch = report_model(tiny, 4), tiny.example_input(4)
    assert found.memory == tabulate_memory(tiny, batch).reports
    flops = {}
    for mode in MODES:
        tiny.schedule = mode
        flops[mode] = count_flops(tiny, batch)
    assert found.flop_ratios == {mode: flops[mode] / flops["store"] for mode in MODES}


@pytest.mark.parametrize("depth", [1, 3])
def test_parts_by_hand(depth):
    B, N, D = 4, 16, 64
    model = revzoo.create("rev_vit_digits", overrides=[f"stages.0.depth={depth}"], device="meta")
    found = {part.name: part for part in report_model(model, B).parts}
    assert list(found) == ["stem", "stages.0", "fuse", "head"]
    assert [part.shape for part in found.values()] == [(N, D), (N, D), (N, 2 * D), None]
    stream = B * N * D * 4
    assert {name: part.kept_bytes["invert"] for name, part in found.items()} == {
        "stem": 0,
        "stages.0": 2 * stream,  # the pair at the end
        "fuse": 2 * stream + 2 * B * N * 4,  # the norm's input and statistics
        "head": B * 2 * D * 4,  # the pooled features
    }
    assert found["stem"].kept_bytes["recompute"] == stream  # the first step's input
    assert found["stages.0"].kept_bytes["recompute"] == (2 * depth - 1) * stream  # the input of every other step
    assert found["stages.0"].parameters == depth * (3 * D * D + D * D + 8 * D * D + (3 + 1 + 4 + 1 + 4) * D)


def test_flops_of_one_example_by_hand(tiny):
    N, D = 16, 64
    tokens = N * (4 * D + 12 * D * D) + 2 * N * N * D  # patches, linear layers of a block, attention
    assert report_model(tiny, 3).flops == tokens + 2 * D * 10


def test_a_bijection_is_no_unit_and_stores_nothing():
    found = shipped("irevnet_digits")
    bijections = [part for part in found.parts if part.kind == "bijection"]
    assert bijections
    assert not {part.name for part in bijections} & set(revzoo.create("irevnet_digits", device="meta").units)
    assert all(part.kept_bytes == dict.fromkeys(MODES, 0) and part.parameters == 0 for part in bijections)
    lines = [line for line in text_of(found).splitlines() if "bijection: space_to_depth" in line]
    assert len(lines) == len(bijections)
    assert all(line.count("nothing") == len(MODES) for line in lines)


def test_inverted_steps_keep_one_pair_of_streams_a_chain():
    found = shipped("irevnet_digits")
    *others, last = [part for part in found.parts if part.kind == "stage"]
    assert [part.kept_bytes["invert"] for part in others] == [0] * len(others)
    assert last.kept_bytes["invert"] == 2 * found.batch_size * 4 * torch.Size(last.shape).numel()


def test_show_answers_the_questions():
    model = revzoo.create("revnet_digits", overrides=[f"stages.{i}.depth=1" for i in range(3)])
    before = {key: t.clone() for key, t in model.state_dict().items()}
    text = text_of(report_model(model, 8))
    for answer in (
        "revnet_digits (revnet)",
        f"{sum(p.numel() for p in model.parameters()):,}, ",
        f"{len(model.steps)}, coupling additive",
        "What is kept for backward, batch of 8 images",
        "node: residual_pair",
        "stages.1.transition",
        "FLOP per image, a multiply-add counted once",
        "activations at the peak",
        "source",
        "expected",
        "revnet_digits.safetensors (top1 99.44; trained by: revzoo train digits_revnet)",
    ):
        assert answer in text
    assert len([line for line in text.splitlines() if "node: " in line]) == 3 + sum("transition" in u for u in model.units)
    assert all(torch.equal(before[key], t) for key, t in model.state_dict().items())
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert set(model.schedule) == {"store", "invert"}


def test_texts_are_called_texts():
    text = text_of(shipped("rev_bert_mini"))
    assert "batch of 8 texts" in text
    assert "per text" in text
    assert "image" not in text


def test_a_model_without_shipped_weights_says_none():
    model = revzoo.create("rev_vit_digits", overrides=["name=mine", *TINY], device="meta")
    lines = text_of(report_model(model, 2)).splitlines()
    (line,) = (line for line in lines if line.lstrip().startswith("weights ") and "iB" not in line)
    assert line.split() == ["weights", "none"]


def test_names_are_no_markup_and_no_batch_is_allocated():
    model = revzoo.create("rev_vit_digits", overrides=["name='[/red]'", "family='[bold]'", *TINY])
    text = text_of(report_model(model, 10**9))
    assert "[/red] ([bold])" in text
    assert "batch of 1000000000 images" in text


def test_the_twin_stands_beside_it(monkeypatch):
    with torch.device("meta"):
        twin = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Sigmoid(), nn.Linear(32, 10, bias=False))
    with_twin(monkeypatch, twin)
    model = revzoo.create("rev_vit_digits", overrides=[*TINY, *twin_of("plain")], device="meta")
    beside = report_model(model, 5)
    found = beside.twin
    assert (found.parameters, found.flops, found.problem) == (64 * 32 + 32 + 320, 64 * 32 + 320, None)
    assert found.memory.after_forward_bytes == 5 * 32 * 4 + 4  # the sigmoid's output, and the loss
    text = text_of(beside)
    assert "timm plain: 2,400 parameters, 2.37 kFLOP per image" in text
    (heading,) = (line for line in text.splitlines() if "twin: plain" in line)
    assert "recompute" in heading


def test_a_twin_that_cannot_be_built_says_why(monkeypatch):
    with_twin(monkeypatch, "timm has no such model")
    model = revzoo.create("rev_vit_digits", overrides=[*TINY, *twin_of("plain")], device="meta")
    beside = report_model(model, 2)
    assert "timm plain: not measured, timm has no such model" in text_of(beside)
    assert (beside.twin.memory, beside.twin.parameters) == (None, None)


def test_json_is_the_report_and_nothing_else(tiny, tmp_path, capsys):
    file = tmp_path / "tiny.yaml"
    file.write_text(tiny.spec.to_yaml())
    assert zoo_cli.main(["show", str(file), "--json", "--batch", "3"]) == 0
    printed = json.loads(capsys.readouterr().out)
    found = report_model(tiny, 3)
    assert printed == json.loads(json.dumps(found.to_dict()))
    assert printed["digest"] == tiny.spec.digest
    assert printed["memory"]["invert"] == found.memory["invert"].to_dict()
    assert printed["parts"][1]["kept_bytes"] == found.parts[1].kept_bytes
    assert printed["input"] == {"kind": "image", "channels": 1, "size": [8, 8]}


@pytest.mark.parametrize("name", ["rev_bert_mini", "irevnet_digits"])
def test_the_picture_is_a_png_and_repeats(name, tmp_path):
    found = shipped(name)
    for file in ("a.png", "b.png"):
        plot_model(found, tmp_path / file)
    picture = (tmp_path / "a.png").read_bytes()
    assert picture == (tmp_path / "b.png").read_bytes()
    assert picture[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", picture[16:24])
    inches = {"node": 1.35, "stage": 1.75, "bijection": 1.3}
    assert width == pytest.approx(120 * max(8.5, 1.3 + sum(inches[part.kind] for part in found.parts)), abs=1)
    assert height == 792


def test_the_picture_comes_with_the_text(tiny, tmp_path, capsys):
    file = tmp_path / "tiny.yaml"
    file.write_text(tiny.spec.to_yaml())
    assert zoo_cli.main(["show", str(file), "--batch", "2", "--plot", str(tmp_path / "tiny.png")]) == 0
    assert "What is kept for backward" in capsys.readouterr().out
    assert (tmp_path / "tiny.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nowhere/a.png", "cannot read or write {}/nowhere/a.png: No such file or directory"),
        ("a.pdf", "A picture is written as PNG. Received: --plot {}/a.pdf. Use --plot network.png."),
        ("folder.png", "cannot read or write {}/folder.png: Is a directory"),
    ],
)
def test_a_picture_that_cannot_be_written_is_said_before_anything_is_measured(path, message, tmp_path, capsys, monkeypatch):
    (tmp_path / "folder.png").mkdir()
    monkeypatch.setattr("revzoo.create", None)
    assert zoo_cli.main(["show", "rev_vit_digits", "--plot", str(tmp_path / path)]) == 2
    assert capsys.readouterr().err == f"revzoo: {message.format(tmp_path)}\n"
    assert [file.name for file in tmp_path.iterdir()] == ["folder.png"]


@pytest.mark.parametrize(
    ("number", "flops", "count"),
    [
        (0, "0 FLOP", "0"),
        (999, "999 FLOP", "999"),
        (4_917_888, "4.92 MFLOP", "4.92 M"),
        (17_463_000_000, "17.5 GFLOP", "17.5 G"),
        (999_999, "1 MFLOP", "1 M"),
        (1_234_000_000_000, "1.234 TFLOP", "1.234 T"),
    ],
)
def test_numbers_for_people(number, flops, count):
    assert (format_flops(number), format_count(number)) == (flops, count)
