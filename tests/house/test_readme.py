"""Figures of the README and of pages in docs/ are what the results say."""

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def readme():
    spec = importlib.util.spec_from_file_location("benchmark_readme", ROOT / "benchmarks" / "readme.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", ["README.md", "docs/numerics.md", "docs/reversible.md", "docs/distributed.md"])
def test_they_are_what_the_results_say(page, readme):
    text = (ROOT / page).read_text()
    assert readme.write_section(text, readme.PAGES[page]()) == text, "run python benchmarks/readme.py"
    assert text.count(readme.BEGIN) == text.count(readme.END) == 1


def test_accuracies_stand_beside_each_other(readme):
    results = [
        {
            "data": data,
            "hardware": {"cpu": "AMD EPYC", "threads": 1},
            "versions": {"torch": "2.15.0+cpu"},
            "size": {"seeds": [1, 2, 3]},
            "summary": [{"network": "hybrid", "depth": 6, "store": stored, "invert": 9.25}],
        }
        for data, stored in (("digits", 98.32), ("MNIST", 97.0))
    ]
    head, _, row, _, *text = readme.describe_accuracies(results)
    assert head == "| network | depth | digits: stored [%] | rebuilt [%] | MNIST: stored [%] | rebuilt [%] |"
    assert row == "| hybrid | 6 | 98.3 | 9.2 | 97.0 | 9.2 |"
    assert " ".join(text).startswith(
        "Test accuracy, mean over trainings (3 on digits, 3 on MNIST) on one thread of an AMD EPYC, torch 2.15.0, float32"
    )


def test_times_of_reversible_networks_are_relative_to_checkpointing(readme):
    ratios = {"stored": 0.75, "checkpointed": 1.0, "8 bits": 1.034}
    rows = [{"network": "Llama", "layers": 24, "dtype": "float32", "rounds": 15, "of_checkpointed": ratios}]
    rows[0]["flops_of_checkpointed"] = ratios | {"8 bits": 1.04}
    part = {"hardware": {"cpu": "AMD EPYC", "threads": 1}, "versions": {"torch": "2.15.0+cpu"}, "rows": rows}
    head, _, row, _, *text = readme.describe_reversible_time(part)
    assert head == "| CPU time / FLOPs, relative to checkpointing | stored | 8 bits |"
    assert row == "| Llama, 24 blocks, float32 | 0.75 / 0.75 | 1.03 / 1.04 |"
    assert "median of 15 rounds on one thread of an AMD EPYC, torch 2.15.0" in " ".join(text)


def test_batches_stand_beside_each_other_and_what_does_not_fit_is_a_dash(readme):
    def point(batch):
        return {"batch": batch, "send_seconds": 0.25, "compute_seconds": 0.75}

    assumed = {"flops": 4e14, "nvlink": 4.5e11, "network": 4e11, "share": 0.9, "node": 8}
    assumed |= {"nvlink_seconds": 3.4e-6, "network_seconds": 14e-6}
    largest = {"store": {"24 GB": point(0), "80 GB": point(3)}, "stage_inputs": {"24 GB": point(4), "80 GB": point(40)}}
    row = {"model": "rev", "ranks": 8, "parameter_bytes": 25e8, "sent_bytes": 1e9, "largest": largest}
    head, _, line, _, *text = readme.describe_fits({"torch": "2.15.0+cpu", "assumed": assumed, "rows": [row]})
    assert head == "| model | weights | cards | 24 GB | 80 GB | sent in a step | communication on 80 GB |"
    assert line == "| rev | 2.50 GB | 8 | - → 4 | 3 → 40 | 1.00 GB | 25.0 → 25.0 % |"
    assert "for 90 % of its memory" in " ".join(text)
    assert "400 Gb/s between nodes" in " ".join(text)


def test_a_changed_result_changes_it(readme):
    results = {
        "hardware": {"cpu": "AMD EPYC", "threads": 1},
        "versions": {"torch": "2.15.0+cpu"},
        "methods": ["plain autograd", "other"],
        "packages": {"other": "1.2"},
        "left_out": {},
        "figures": [
            {"what": what, "net": net, "method": method, "blocks": blocks, "value": value}
            for net, stream in (("transformer", 1_210_368), ("conv", 4_194_304))
            for method, factor in (("plain autograd", 1), ("other", 2))
            for what, blocks, value in (
                ("peak", 6, 10 * stream * factor),
                ("peak", 48, 20 * stream * factor),
                ("slope", 48, 0),
                ("flops", 48, 100 * factor),
                ("time", 12, 1.5 * factor),
            )
        ],
        "checks": {"gradients": {"plain autograd": {"conv": ""}, "other": {"conv": "wrong"}}},
    }
    lines = list(readme.describe_peers(results))
    assert "| plain autograd | 10.0 / 20.0 | 1.000 | 1.50 | 10.0 / 20.0 | 1.000 | 1.50 | 1 of 1 |" in lines
    assert "| other | 20.0 / 40.0 | 2.000 | 3.00 | 20.0 / 40.0 | 2.000 | 3.00 | 0 of 1 |" in lines
    assert "one thread of an AMD EPYC, torch 2.15.0 (other 1.2)" in " ".join(lines)
