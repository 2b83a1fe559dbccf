"""The benchmark of the runtime runs, and its figures at small sizes are the exact ones."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

FILE = Path(__file__).parents[2] / "benchmarks" / "runtime.py"


@pytest.fixture(scope="module")
def figures(tmp_path_factory):
    out = tmp_path_factory.mktemp("benchmark") / "figures.json"
    done = subprocess.run(
        [sys.executable, "-W", "error", str(FILE), "--quick", "--out", str(out)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "peak activation memory" in done.stdout
    return json.loads(out.read_text())


def values(figures, what, net, method):
    matching = [f for f in figures["figures"] if (f["what"], f["net"], f["method"]) == (what, net, method)]
    return {f["depth"]: f["value"] for f in matching}


@pytest.mark.slow
def test_result_says_where_and_how_it_was_measured(figures):
    assert figures["command"].startswith("python ")
    assert figures["hardware"].keys() == {"cpu", "cores", "threads"}
    assert figures["versions"].keys() == {"python", "torch", "revzoo"}


@pytest.mark.slow
@pytest.mark.parametrize(("net", "states", "alone"), [("transformer", 4, 13), ("conv", 4, 5)])
def test_inverted_memory_is_the_bound_at_every_depth(figures, net, states, alone):
    peaks = values(figures, "peak activation memory, in streams", net, "invert")
    assert list(peaks) == [2, 3]
    assert peaks[2] == peaks[3]
    assert states + alone < peaks[2] < states + alone + 0.2  # statistics of norms are a larger share of a tiny stream


@pytest.mark.slow
def test_checkpoint_and_recompute_add_two_streams_a_block(figures):
    for net in ("transformer", "conv"):
        for method in ("checkpoint", "recompute"):
            peaks = values(figures, "peak activation memory, in streams", net, method)
            assert peaks[3] - peaks[2] == pytest.approx(2, abs=1e-9)


@pytest.mark.slow
def test_flops_of_convolutions(figures):
    def ratio(method):
        return values(figures, "FLOPs over stored", "conv", method)[3]

    assert ratio("store") == 1
    assert ratio("checkpoint") == 5 / 4  # the last convolution of a block is not run again
    assert ratio("recompute") == pytest.approx(7 / 6)  # that of each step is not
    assert ratio("invert") == pytest.approx(4 / 3 - 1 / 36)  # only that of the first step is not


@pytest.mark.slow
def test_gradients(figures):
    errors = [f for f in figures["figures"] if f["what"].startswith("gradient")]
    assert len(errors) == 3
    assert all(f["value"] <= f["target"] for f in errors)


def test_full_run_covers_the_published_sizes():
    spec = importlib.util.spec_from_file_location("benchmark_runtime", FILE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    transformer, conv = module.nets(quick=False)
    assert (transformer.shape, transformer.depths) == ((8, 197, 192), (6, 12, 24, 48))
    assert (conv.shape, conv.depths) == ((32, 32, 32, 32), (4, 8, 16, 32))
    assert (transformer.most_units, transformer.most_flops, transformer.most_seconds) == (17.5, 1.3255, 1.35)
    assert (conv.most_units, conv.most_flops) == (10.0, 1.3334)
