"""The report of a model: every part, what it keeps, and that the parts add up."""

from functools import cache

import pytest
import torch
from torch import nn

import revzoo
from revzoo.analysis.counting import report_model
from revzoo.analysis.flops import count_flops
from revzoo.analysis.report import ModelReport
from revzoo.analysis.step_memory import measure_modes
from revzoo.runtime.schedule import MODES

TINY = ["stages.0.depth=1"]
SHORT = ("stages.0.depth=1", "stages.1.depth=2")  # the last two steps write the pair that is kept


@cache
def report_of(name: str, *overrides: str) -> ModelReport:
    return report_model(revzoo.create(name, overrides=overrides, device="meta"))


@pytest.fixture
def tiny() -> revzoo.Model:
    return revzoo.create("rev_vit_digits", overrides=TINY, device="meta")


def twin_of(name: str) -> list[str]:
    return ["twin={library: timm, name: " + name + "}"]


@pytest.mark.parametrize(("name", "overrides"), [("rev_bert_mini", TINY), ("irevnet_digits", SHORT)])
def test_parts_add_up(name, overrides):
    report = report_of(name, *overrides)
    for mode in MODES:
        kept = sum(part.kept_bytes[mode] for part in report.parts)
        assert kept + 4 == report.memory[mode].after_forward_bytes  # 4: the loss
    assert report.parameters == sum(part.parameters for part in report.parts)
    assert report.steps == sum(part.steps for part in report.parts)


def test_the_published_schedule_of_revnet_is_reported_where_there_are_transitions():
    model = revzoo.create("revnet_digits", overrides=[f"stages.{stage}.depth=1" for stage in range(3)], device="meta")
    report, batch = report_model(model, 2), model.example_input(2)
    assert list(report.memory) == list(report.flop_ratios) == [*MODES, "stage_inputs"]
    model.schedule = "stage_inputs"
    assert report.memory["stage_inputs"] == revzoo.measure_memory(model, batch)
    assert list(report_of("rev_vit_digits", *TINY).memory) == list(MODES)


def test_measuring_together_is_measuring_alone(tiny):
    report, batch = report_model(tiny, 4), tiny.example_input(4)
    assert report.memory == measure_modes(tiny, batch)[0]
    flops = {}
    for mode in MODES:
        tiny.schedule = mode
        flops[mode] = count_flops(tiny, batch)
    assert report.flop_ratios == {mode: flops[mode] / flops["store"] for mode in MODES}


@pytest.mark.parametrize("depth", [1, 2])
def test_parts_by_hand(depth):
    B, N, D = 4, 16, 64
    model = revzoo.create("rev_vit_digits", overrides=[f"stages.0.depth={depth}"], device="meta")
    parts = {part.name: part for part in report_model(model, B).parts}
    assert list(parts) == ["stem", "stages.0", "fuse", "head"]
    assert [part.shape for part in parts.values()] == [(N, D), (N, D), (N, 2 * D), None]
    stream = B * N * D * 4
    assert {name: part.kept_bytes["invert"] for name, part in parts.items()} == {
        "stem": 0,
        "stages.0": 2 * stream,  # the pair at the end
        "fuse": 2 * stream + 2 * B * N * 4,  # the norm's input and statistics
        "head": B * 2 * D * 4,  # the pooled features
    }
    assert parts["stem"].kept_bytes["recompute"] == stream  # the first step's input
    assert parts["stages.0"].kept_bytes["recompute"] == (2 * depth - 1) * stream  # the input of every other step
    assert parts["stages.0"].parameters == depth * (3 * D * D + D * D + 8 * D * D + (3 + 1 + 4 + 1 + 4) * D)


def test_macs_of_one_example_by_hand(tiny):
    N, D = 16, 64
    tokens = N * (4 * D + 12 * D * D) + 2 * N * N * D  # patches, linear layers of a block, attention
    assert report_model(tiny, 3).macs == tokens + 2 * D * 10


def test_a_bijection_is_no_unit_and_stores_nothing():
    bijections = [part for part in report_of("irevnet_digits", *SHORT).parts if part.kind == "bijection"]
    assert bijections
    assert not {part.name for part in bijections} & set(revzoo.create("irevnet_digits", device="meta").units)
    assert all(part.kept_bytes == dict.fromkeys(MODES, 0) and part.parameters == 0 for part in bijections)


def test_inverted_steps_keep_one_pair_of_streams_a_chain():
    report = report_of("irevnet_digits", *SHORT)
    *others, last = [part for part in report.parts if part.kind == "stage"]
    assert [part.kept_bytes["invert"] for part in others] == [0] * len(others)
    assert last.kept_bytes["invert"] == 2 * report.batch_size * 4 * torch.Size(last.shape).numel()


def test_the_twin_is_measured_with_the_same_batch(monkeypatch):
    with torch.device("meta"):
        built = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Sigmoid(), nn.Linear(32, 10, bias=False))
    monkeypatch.setattr("revzoo.analysis.counting.build_twin", lambda spec: built)
    model = revzoo.create("rev_vit_digits", overrides=[*TINY, *twin_of("plain")], device="meta")
    twin = report_model(model, 10**9).twin  # nothing is allocated
    assert (twin.parameters, twin.macs, twin.problem) == (64 * 32 + 32 + 320, 64 * 32 + 320, None)
    assert twin.memory.after_forward_bytes == 10**9 * 32 * 4 + 4  # the sigmoid's output, and the loss
    assert twin.memory.batch_bytes == 10**9 * 64 * 4
