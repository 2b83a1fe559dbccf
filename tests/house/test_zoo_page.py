"""The zoo's page: a row for each model, of today's specs, and lines from which the site computes what fits a card."""

import sys
from importlib import import_module
from pathlib import Path

import numpy
import pytest
import torch
from torch import nn

import revzoo
from revzoo.analysis.dry_run import compute_cross_entropy, compute_usual_loss, isolated
from revzoo.analysis.step_memory import run_and_measure
from revzoo.in_place.ways import chunk_loss_of, in_mode, list_ways
from revzoo.inplace_abn import backward
from revzoo.inplace_abn.layer import InPlaceABN2d
from revzoo.runtime import chunk_size
from revzoo.spec import load_spec
from tests.in_place.networks import Tanh, Toy

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
zoo, card, fits = (import_module(name) for name in ("zoo", "zoo_card", "fits"))
sys.path.pop(0)
TABLE = zoo.read_table(ROOT / "docs" / "zoo.json")
COMMAND = "Run `python benchmarks/zoo.py`."


def peak(method, dtype: str, size: int, optimizer=(0, 0)) -> int:
    lines = method[dtype]
    alive = [fixed + each * size for fixed, each in zip(lines["fixed"], lines["each"], strict=True)]
    if "tile" in lines:
        alive = [start + tile * -(-size // 8) for start, tile in zip(alive, lines["tile"], strict=True)]
    state, update = optimizer
    return max(*alive, alive[-1] + update) + state


def test_the_page_is_up_to_date():
    specs = {name: load_spec(name) for name in revzoo.list_models()}
    assert {name for name in specs | TABLE if name not in specs or zoo.is_outdated(TABLE.get(name), specs[name])} == set(), (
        COMMAND
    )
    assert [name for name, row in TABLE.items() if row | zoo.describe_spec(specs[name]) != row] == [], COMMAND
    assert (ROOT / "docs" / "zoo.md").read_text() == zoo.format_page(TABLE), COMMAND


@pytest.mark.parametrize("name", ["rev_bert_mini", pytest.param("revnet_38", marks=pytest.mark.slow)])  # one has a twin
def test_measuring_again_gives_the_same_row(name):
    assert zoo.measure(name) == {key: value for key, value in TABLE[name].items() if key != "card"}, COMMAND


def test_only_what_has_changed_is_measured(tmp_path, monkeypatch):
    names = ("irevnet_digits", "revnet_digits", "rev_vit_digits", "revnet_38")
    rows = {name: dict(TABLE[name]) for name in names}
    rows["revnet_digits"]["digest"] = "0"
    rows["revnet_38"]["twin"] = None
    rows["irevnet_digits"]["source"] = "hearsay"
    del rows["rev_vit_digits"]["card"]
    zoo.write_table(tmp_path / "zoo.json", rows | {"revnet_9": rows["revnet_digits"]})
    measured, counted = [], []
    bare = {name: {key: value for key, value in row.items() if key != "card"} for name, row in TABLE.items()}
    monkeypatch.setattr(zoo, "measure", lambda name: measured.append(name) or bare[name])
    monkeypatch.setattr(zoo, "count_card", lambda name: counted.append(name) or TABLE[name]["card"])
    zoo.update(tmp_path, names)
    assert measured == ["revnet_digits", "revnet_38"]
    assert counted == ["revnet_digits", "rev_vit_digits", "revnet_38"]
    assert zoo.read_table(tmp_path / "zoo.json") == {name: TABLE[name] for name in names}


def test_lines_give_every_peak():
    times = numpy.random.default_rng(0).integers(0, 1000, (200, 2))  # fixed bytes, and those of an example
    times[:, 0] += 10_000 - 10 * times[:, 1]  # what is low for small batches is high for large ones
    steps = [numpy.ravel([[alive, -alive] for alive in times @ (1, size)]) for size in card.SIZES]
    lines = card.fit_timeline(steps)
    for size in (1, 2, 7, 50, 1000):
        assert peak({"float32": lines}, "float32", size) == (times @ (1, size)).max()
    assert lines["at"] == sorted(lines["at"])
    assert len(lines["at"]) < 40


def test_a_backward_in_parts_has_as_many_in_every_batch(monkeypatch):
    """As many as for the larger of the batches that are counted, which is so taken to the byte."""
    monkeypatch.setattr(backward, "_PART", 2**11)
    network = nn.Sequential(nn.Conv2d(3, 16, 3), InPlaceABN2d(16), nn.Conv2d(16, 8, 3))
    batches = [torch.randn(size, 3, 18, 18) for size in card.SIZES]
    lines = card.fit_timeline([card.count_step(network, batch, "float32")[0] for batch in batches])
    assert peak({"float32": lines}, "float32", card.SIZES[1]) == revzoo.measure_memory(network, batches[1]).peak_bytes


@pytest.mark.parametrize("dtype", card.DTYPES)
def test_a_small_model_takes_what_its_card_says(dtype):
    model = revzoo.create("rev_vit_digits", device="meta").train()
    row = TABLE["rev_vit_digits"]["card"]
    model.schedule = "invert"
    for optimizer in ("SGD", "AdamW"):
        taken = card.OPTIMIZERS[optimizer](model.parameters())
        with card.autocast(dtype):
            report = revzoo.measure_memory(model, model.example_input(5), taken)
        inverted = next(method for method in row["methods"] if method["name"] == "invert")
        assert peak(inverted, dtype, 5, row["optimizers"][optimizer]) == report.peak_bytes


def test_counting_again_gives_the_same_lines():
    model = revzoo.create("rev_vit_digits", device="meta").train()
    stored = card.count_method(model, model, "store", ["store"] * len(model.units))
    assert stored == TABLE["rev_vit_digits"]["card"]["methods"][0]


def test_a_loss_in_chunks_takes_what_its_lines_say(monkeypatch):
    """Of a batch of many chunks, and of another number of them than is counted; without two chunks there are no lines."""
    model = revzoo.create("rev_gpt_mini", overrides=["input.length=16", "input.vocabulary=1000"], device="meta").train()
    whole = {"name": "invert", "modes": {}, "flops": 0}
    with in_mode(model, "invert"), chunk_loss_of(model):
        assert list(card.count_chunked_loss(model, model.example_input, compute_cross_entropy, whole)) == []
        monkeypatch.setattr(chunk_size, "CHUNK_BYTES", 100 * 8 * 1000)  # 100 tokens
        (lines,) = card.count_chunked_loss(model, model.example_input, compute_cross_entropy, whole)
        with isolated(model, model.example_input(50)) as inputs:
            counted = run_and_measure(model, inputs, loss=compute_cross_entropy).memory.peak_bytes
    assert peak(lines, "float32", 50) == counted


def test_steps_in_tiles_take_what_their_lines_say():
    """To the byte where a batch is cut into eight tiles, the last of which may be shorter; and about that where into five."""
    network = fits.Network(lambda: Toy(Tanh(), Tanh()), (8, 6), "float32")
    (lines,) = fits.count_row(network, "* tiles")["card"]["methods"]
    assert lines["name"] == "random signs, 8 tiles"
    with torch.device("meta"):
        model = network.make()
    counted = {}
    with list_ways(model, network.make_batch(1))[lines["name"]](model):
        for size in (5, 40, 55):
            counted[size] = card.count_step(model, network.make_batch(size), "float32", compute_usual_loss)[0].cumsum().max()
    taken = {size: peak(lines, "float32", size) for size in counted}
    assert (taken[40], taken[55]) == (counted[40], counted[55])
    assert abs(taken[5] / counted[5] - 1) < 0.03  # the bits of so small tiles fill no bytes
