"""`revzoo bench`: how much it measures, and what it prints, draws and says in JSON."""

import json

import pytest

from revzoo.bench.report import FULL, QUICK, BenchReport


@pytest.fixture
def sizes(monkeypatch):
    """Return the list of sizes asked for; nothing is measured."""
    asked = []

    def compare(size, announce):
        announce("nothing")
        asked.append(size)
        return BenchReport(["mine"], left_out={"mine": "not installed: pip install mine"})

    monkeypatch.setattr("revzoo.bench.report.compare_methods", compare)
    return asked


def test_what_is_left_out_is_said(run, sizes):
    assert run("bench").splitlines()[-1] == "mine: not installed: pip install mine"
    assert sizes == [QUICK]


def test_json(run, sizes):
    values = json.loads(run("bench", "--full", "--json"))
    assert values["left_out"] == {"mine": "not installed: pip install mine"}
    assert sizes == [FULL]


def test_picture_has_to_be_a_png(refused, sizes, tmp_path):
    assert refused("bench", "--plot", tmp_path / "bench.svg").startswith("A picture is written as PNG.")
    assert sizes == []


def test_sizes():
    assert FULL.depths == {"transformer": (6, 48), "conv": (4, 32)}
    assert (QUICK.full, FULL.full) == (False, True)
