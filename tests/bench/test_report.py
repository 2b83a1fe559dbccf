"""The comparison as a whole: what it holds, its JSON, its tables and its picture."""

import json

import pytest
from revzoo.bench.method import Method
from revzoo.bench.net import SMALL_NETS
from revzoo.bench.report import BenchReport
from revzoo.display.figures.bench import plot_bench

from revzoo.display.console import print_renderable
from revzoo.display.tables import bench as tables
from revzoo.errors import InputError


def test_what_is_not_run_is_said(report):
    assert report.methods == [
        "plain autograd", "torch.compile, budget 0.5", "checkpoint per block", "revzoo invert", "missing",
    ]  # fmt: skip
    assert report.left_out == {
        "torch.compile, budget 0.5": "compiles: run with --full",
        "missing": "not installed: pip install no-such-package",
    }


def test_a_package_without_the_class_is_said(monkeypatch):
    def fail(steps, net):
        raise ModuleNotFoundError("No module named 'torch.reversible'")

    monkeypatch.setattr("revzoo.bench.method.version", lambda package: "1.2")
    with pytest.raises(InputError, match=r"version 1\.2: No module named 'torch\.reversible'\. Try: pip install old"):
        Method("mine", fail, "mine", install="old").require()


def test_figures_of_every_method_and_net(report):
    for method in ("plain autograd", "checkpoint per block", "revzoo invert"):
        for net in ("transformer", "conv"):
            assert list(report.find("peak", net, method)) == [1, 2]
            assert list(report.find("flops", net, method)) == [1, 2]
            assert list(report.find("time", net, method)) == [1]
        assert len(report.find("machinery", "small steps", method)) == 1
    assert report.find("time", "conv", "plain autograd") == {1: 1}
    assert report.find("slope", "conv", "revzoo invert") == {2: 0}


def test_checks_passed(report):
    rows = ["gradients in float64", "BatchNorm: statistics updated once"]
    assert list(report.checks) == rows
    assert [report.count_passed(name) for name in ("plain autograd", "checkpoint per block", "revzoo invert")] == [
        (2, 2), (1, 2), (2, 2),
    ]  # fmt: skip
    assert report.checks[rows[1]]["checkpoint per block"]["transformer"] == ""
    assert report.checks[rows[1]]["checkpoint per block"]["conv"].startswith("relative error ")


def test_json_holds_everything(report):
    values = json.loads(json.dumps(report.to_dict()))
    assert BenchReport.from_dict(values) == report
    assert values["units"].keys() == {f["what"] for f in values["figures"]}


def test_table(report, monkeypatch, capsys):
    monkeypatch.setattr(tables, "NETS", SMALL_NETS)
    monkeypatch.setenv("COLUMNS", "160")  # where it is narrower, there are two tables
    print_renderable(tables.tabulate_bench(report))
    printed = capsys.readouterr().out
    cells = next(line for line in printed.splitlines() if "revzoo invert" in line).split("│")
    assert [cell.strip() for cell in cells[1:3] + cells[7:10]] == ["4", "revzoo invert", "9.0 / 9.0", "0.00", "1.292"]
    assert cells[-2].strip() == "2 of 2"
    assert "missing: not installed: pip install no-such-package" in printed
    row = next(line for line in printed.splitlines() if "BatchNorm" in line)
    assert row.split("│")[2:5] == [" + ", " - ", " + "]


def test_picture(report, tmp_path):
    plot_bench(report, tmp_path / "bench.png")
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
