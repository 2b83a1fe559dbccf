"""The benchmark of rounding errors: at toy size everything is measured and drawn."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

FILE = Path(__file__).parents[2] / "benchmarks" / "numerics.py"


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(FILE.parent))
    spec = importlib.util.spec_from_file_location("benchmark_numerics", FILE)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def test_mnist_is_read(benchmark, tmp_path):
    for split, count in (("train", 3), ("t10k", 2)):
        (tmp_path / f"{split}-images-idx3-ubyte").write_bytes(bytes(16) + bytes(range(256)) * 3 + bytes(784 * count - 768))
        (tmp_path / f"{split}-labels-idx1-ubyte").write_bytes(bytes(8) + bytes(range(count)))
    images = benchmark.load_images(tmp_path)
    assert images.side == 14
    assert images.train[0].shape == (3, 1, 16, 16)
    assert torch.equal(images.test[1], torch.tensor([0, 1]))
    x, labels = images.draw(4, torch.Generator().manual_seed(0))
    assert x.shape == (4, 1, 14, 14)
    assert labels.max() <= 2
    mean = (2 + 3 + 30 + 31) / 4  # of the second 2x2 pixels of the first image
    assert float(images.train[0][0, 0, 1, 2]) == pytest.approx((mean - 33.3) / 78.6)


def test_tests_are_the_images_in_nine_positions(benchmark):
    images = benchmark.load_images(None)
    tests = list(images.list_tests())
    assert len(tests) == 9
    assert all(x.shape == (355, 1, 8, 8) for x, _ in tests)
    middle, corner = tests[4][0], tests[0][0]
    assert torch.equal(middle[:, :, :-1, :-1], corner[:, :, 1:, 1:])
    assert len(images.train[0]) == 1442


@pytest.mark.slow
def test_everything_is_measured_and_drawn(tmp_path):
    command = [sys.executable, "-W", "error", str(FILE), "--quick", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "numerics.json").read_text())
    assert result["command"].startswith("python ")
    assert result["ratios"]["states"].keys() == {"layer-wise", "hybrid"}
    assert result["angles"].keys() == {"float32", "autocast", "bfloat16 streams", "exact"}
    assert len(result["accuracies"]["depths"]) == 3
    assert len(result["accuracies"]["slopes"]) == 4
    pictures = [f"numerics_{name}.png" for name in ("accuracy", "alpha", "angle", "ratios", "states")]
    assert sorted(path.name for path in tmp_path.glob("*.png")) == pictures
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in pictures)
