"""The benchmarks of published figures run; what they count of toy networks is exact."""

import importlib.util
import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import torch

import revzoo

FOLDER = Path(__file__).parents[2] / "benchmarks"
VARIANTS = ("stored", "inverted", "look-ahead")


@pytest.fixture
def load(monkeypatch):
    """Return a function that imports a file of the benchmarks."""
    monkeypatch.syspath_prepend(FOLDER)

    def load_file(name):
        spec = importlib.util.spec_from_file_location(f"benchmark_{name}", FOLDER / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        return module

    return load_file


def run(name, out):
    command = [sys.executable, "-W", "error", str(FOLDER / f"{name}.py"), "--quick", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads((out / f"{name}.json").read_text())
    assert result["hardware"]["threads"] == 1
    return result, done.stdout


@pytest.mark.slow
def test_throughput(tmp_path):
    result, printed = run("pareprop", tmp_path)
    assert {network["family"] for network in result["networks"].values()} == {
        "Rev-ViT",
        "Rev-MViT",
        "Rev-Swin",
        "Rev-RoBERTa",
    }
    for network in result["networks"].values():
        assert network["unit"] == "stored run = 1"
        twin = () if "ordinary twin" in network["missing"] else ("ordinary twin",)
        rows = [(row["variant"], row["batch"]) for row in network["rows"]]
        assert rows == [(variant, batch) for variant in (*twin, *VARIANTS) for batch in (1, 2)]
        assert all(row["speed"] == 1 for row in network["rows"] if row["variant"] == "stored")
        assert all(row["speed"] > 0 for row in network["rows"])
        assert network["label"] in printed
    assert result["networks"]["rev_swin_digits"]["missing"]["ordinary twin"] == "rev_swin_digits names no twin"
    assert {"ordinary twin"}.isdisjoint(result["networks"]["rev_vit_ti"]["missing"])
    pictures = {path.name for path in tmp_path.glob("*.png")}
    assert pictures == {"pareprop_vision.png", "pareprop_text.png", "pareprop_swin.png"}


@pytest.mark.slow
def test_memory(tmp_path):
    result, _ = run("published_memory", tmp_path)
    tables = result["tables"]
    model = revzoo.create("revnet_38", device="meta")
    batch = model.example_input(2)
    rows = {row["variant"]: row for row in tables["revnet"]["rows"]}
    assert list(rows) == ["ordinary twin", "stored", "published schedule", "stage inputs", "inverted"]
    for variant, schedule in (("stored", "store"), ("inverted", "invert")):
        model.schedule = schedule
        memory = revzoo.measure_memory(model, batch)
        assert (rows[variant]["parameter_bytes"], rows[variant]["activation_bytes"]) == (464_890 * 4, memory.activation_bytes)
    inputs, published, inverted, stored = (
        rows[variant]["activation_bytes"] for variant in ("stage inputs", "published schedule", "inverted", "stored")
    )
    assert inputs < published < inverted < stored

    peaks = defaultdict(dict)
    for row in tables["pareprop"]["rows"]:
        peaks[row["variant"]][row["batch"]] = row["peak_bytes"]
    swin = revzoo.create("rev_swin_digits", device="meta")
    optimizer = torch.optim.AdamW(swin.parameters())
    assert set(peaks) == {"inverted", "look-ahead"}
    for lookahead, variant in enumerate(("inverted", "look-ahead")):
        swin.lookahead = lookahead
        counted = {batch: revzoo.measure_memory(swin, swin.example_input(batch), optimizer).peak_bytes for batch in (1, 2)}
        assert peaks[variant] == counted
    assert (tmp_path / "published_memory.png").is_file()


@pytest.mark.slow
def test_bytes_per_pixel(tmp_path):
    result, printed = run("bytes_per_pixel", tmp_path)
    rows = {row["model"]: row for row in result["rows"]}
    specs = {name: revzoo.load_spec(name) for name in revzoo.list_models("revn*_digits")}
    assert list(rows) == list(specs)
    for name, row in rows.items():
        model = revzoo.create(name, device="meta")
        assert row["inverted"] == json.loads(json.dumps(revzoo.bytes_per_pixel(model).to_dict()))
        model.schedule = "store"
        assert row["stored"] == revzoo.bytes_per_pixel(model).bytes_per_pixel
        can_invert = any(entry.can_invert for entry in model.layout())
        assert (row["inverted"]["bytes_per_pixel"] < row["stored"]) == can_invert
        assert name in printed
    for row in result["whole_sets"]:
        model = revzoo.create(row["model"], device="meta")
        counted = revzoo.measure_memory(model, model.example_input(50))
        assert (row["images"], row["activation_bytes"]) == (50, counted.activation_bytes)
    assert (tmp_path / "bytes_per_pixel.png").is_file()


@pytest.mark.slow
def test_the_largest_batch_is_the_largest(load):
    benchmark = load("published_memory")
    result = benchmark.count_rev_vit(quick=True)
    assert [row["variant"] for row in result["rows"]] == ["ordinary twin", *VARIANTS]
    for row, variant in zip(result["rows"], benchmark.VARIANTS, strict=True):
        count_peak = benchmark.make_counter("rev_vit_ti", benchmark._TINY_VIT, variant)
        largest, budget = row["largest_batch"], result["budget_bytes"]
        fits, next_one = count_peak(largest), count_peak(largest + 1)
        assert fits <= budget < next_one
        assert next_one - fits == row["bytes_per_image"]


def test_the_published_schedule_of_revnet(load):
    model = revzoo.create("revnet_104", device="meta")
    modes = dict(zip(model.units, load("published_memory")._find_published_schedule(model), strict=True))
    assert [name for name, mode in modes.items() if mode == "recompute"] == [f"stages.{i}.transition" for i in range(4)]
    assert [name for name, mode in modes.items() if mode == "store"] == ["stem", "fuse", "head"]
    assert sum(mode == "invert" for mode in modes.values()) == 26  # two steps in each of 13 units


def test_pictures_of_a_gpu(load, tmp_path):
    benchmark = load("pareprop")
    speeds = {"stored": {8: 90.0, 16: 150.0}, "inverted": {8: 80.0, 16: 120.0, 32: 130.0}, "look-ahead": {16: 132.0, 32: 117.0}}
    rows = [
        {"variant": variant, "batch": batch, "speed": speed, "deviation": 1.0}
        for variant, each in speeds.items()
        for batch, speed in each.items()
    ]
    network = {"label": "Rev-Swin-B", "family": "Rev-Swin", "unit": "samples per second", "rows": rows, "missing": {}}
    assert benchmark.find_gains(network) == {16: 1.1, 32: 0.9}
    benchmark.draw({"rev_swin_b": network}, tmp_path)
    assert {path.name for path in tmp_path.glob("*.png")} == {"pareprop_vision.png", "pareprop_swin.png"}
    (table,) = benchmark.make_tables({"rev_swin_b": network})
    assert list(table.columns[-1].cells) == ["-", "1.1", "0.9"]
