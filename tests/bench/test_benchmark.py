"""The benchmark writes what the README is made of."""

import importlib.util
import json
import sys
from pathlib import Path

import torch
from revzoo.bench.report import QUICK, BenchReport

FOLDER = Path(__file__).parents[2] / "benchmarks"


def test_json_and_picture(report, tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(FOLDER))
    spec = importlib.util.spec_from_file_location("benchmark_peers", FOLDER / "peers.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sizes = []
    monkeypatch.setattr(module, "compare_methods", lambda size, announce: sizes.append(size) or report)
    monkeypatch.setattr(sys, "argv", ["benchmarks/peers.py", "--quick", "--out", str(tmp_path)])
    module.main()
    assert sizes == [QUICK]
    assert "revzoo invert" in capsys.readouterr().out
    values = json.loads((tmp_path / "peers.json").read_text())
    assert BenchReport.from_dict(values) == report
    assert values["hardware"]["threads"] == torch.get_num_threads() == 1
    assert values["versions"].keys() == {"python", "torch", "revzoo"}
    assert (tmp_path / "peers.png").read_bytes().startswith(b"\x89PNG")
