"""Lines in the batch size: what a page computes with is what `measure_memory` counts."""

from pathlib import Path

import numpy
import pytest
import torch
from torch import nn

import revzoo
from revzoo.analysis import zoo
from revzoo.inplace_abn import backward
from revzoo.inplace_abn.layer import InPlaceABN2d
from revzoo.planning import card

DOCS = Path(__file__).parents[2] / "docs"
BATCHES = (2, 3, 12)  # none of them was counted; one example alone may take less, where an operation need not copy it


def peak(method, dtype: str, size: int, optimizer=(0, 0)) -> int:
    lines = method[dtype]
    alive = [fixed + each * size for fixed, each in zip(lines["fixed"], lines["each"], strict=True)]
    state, update = optimizer
    return max(*alive, alive[-1] + update) + state


@pytest.fixture(scope="module")
def table() -> dict[str, zoo.Row]:
    return zoo.read_table(DOCS / "zoo.json")


def test_lines_give_every_peak():
    times = numpy.random.default_rng(0).integers(0, 1000, (200, 2))  # fixed bytes, and those of an example
    times[:, 0] += 10_000 - 10 * times[:, 1]  # what is low for small batches is high for large ones
    steps = [numpy.ravel([[alive, -alive] for alive in times @ (1, size)]) for size in card._SIZES]
    lines = card._fit_timeline(steps)
    for size in (1, 2, 7, 50, 1000):
        assert peak({"float32": lines}, "float32", size) == (times @ (1, size)).max()
    assert lines["at"] == sorted(lines["at"])
    assert len(lines["at"]) < 40


def test_a_backward_in_parts_has_as_many_in_every_batch(monkeypatch):
    """As many as for the larger of the batches that are counted, which is so taken to the byte."""
    monkeypatch.setattr(backward, "_PART", 2**11)
    network = nn.Sequential(nn.Conv2d(3, 16, 3), InPlaceABN2d(16), nn.Conv2d(16, 8, 3))
    batches = [torch.randn(size, 3, 18, 18) for size in card._SIZES]
    lines = card._fit_timeline([card.count_step(network, batch, "float32")[0] for batch in batches])
    assert backward._PART == 2**11
    assert peak({"float32": lines}, "float32", card._SIZES[1]) == revzoo.measure_memory(network, batches[1]).peak_bytes


@pytest.mark.parametrize("dtype", card.DTYPES)
def test_a_small_model_takes_what_its_card_says(dtype, table):
    model = revzoo.create("rev_vit_digits", device="meta").train()
    row = table["rev_vit_digits"]["card"]
    model.schedule = "invert"
    for optimizer in ("SGD", "AdamW"):
        taken = card.OPTIMIZERS[optimizer](model.parameters())
        with card.autocast(dtype):
            report = revzoo.measure_memory(model, model.example_input(5), taken)
        inverted = next(method for method in row["methods"] if method["name"] == "invert")
        assert peak(inverted, dtype, 5, row["optimizers"][optimizer]) == report.peak_bytes


def test_counting_again_gives_the_same_lines(table):
    model = revzoo.create("rev_vit_digits", device="meta").train()
    stored = card.count_method(model, model, "store", ["store"] * len(model.units))
    assert stored == table["rev_vit_digits"]["card"]["methods"][0]


def test_only_models_without_a_card_are_counted(table, tmp_path, monkeypatch):
    bare = {key: value for key, value in table["rev_vit_digits"].items() if key != "card"}
    rows = {"rev_vit_digits": bare, "revnet_digits": table["revnet_digits"] | {"card": {}}}
    zoo.write_table(tmp_path / "zoo.json", rows)
    monkeypatch.setattr(card, "count_card", lambda name: {"methods": [name]})
    announced = []
    card.update(tmp_path, announce=announced.append)
    assert announced == ["rev_vit_digits"]
    assert zoo.read_table(tmp_path / "zoo.json")["rev_vit_digits"]["card"] == {"methods": ["rev_vit_digits"]}


@pytest.mark.slow
def test_cards_hold_for_other_batches(table):
    """The schedule, the dtype and the batch change from model to model, so that each model is run twice only."""
    assert [name for name in table if not table[name].get("card")] == []
    for i, name in enumerate([*table][::6]):  # all take minutes
        model = revzoo.create(name, device="meta").train()
        methods = [method for method in table[name]["card"]["methods"] if method["name"] in ("store", "invert", "twin")]
        for k in range(2):
            method, dtype, size = methods[(i + k) % len(methods)], card.DTYPES[(i + k) % 2], BATCHES[(2 * i + k) % len(BATCHES)]
            network = card.build_checkpointed_twin(model) if method["name"] == "twin" else model
            model.schedule = "store" if method["name"] == "twin" else method["name"]
            with card.autocast(dtype):
                report = revzoo.measure_memory(network, model.example_input(size))
            assert peak(method, dtype, size) == pytest.approx(report.peak_bytes, rel=0.01), (name, method["name"], dtype, size)
