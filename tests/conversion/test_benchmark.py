"""The benchmark of fine-tuning runs: at toy size every network is trained and drawn, as it is and converted."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
FILE = Path(__file__).parents[2] / "benchmarks" / "finetune.py"
NETWORKS = ["ViT", "Swin", "ResNet", "BERT"]
EVERYWHERE = ["original", "stay", "bits_4", "bits_2", "bits_0", "additive"]
FLOATING = ["float_m", "float_dual"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("finetune")
    command = [sys.executable, "-W", "error", str(FILE), "--quick", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in NETWORKS)
    assert "(default)" in done.stdout
    return out


@pytest.fixture(scope="module")
def result(folder):
    return json.loads((folder / "finetune.json").read_text())


def test_result_says_where_and_how_it_was_measured(result):
    assert result["command"].startswith("python ")
    assert result["versions"].keys() == {"python", "torch", "revzoo"}
    assert list(result["networks"]) == NETWORKS
    assert result["default"] in EVERYWHERE
    assert result["points"] == 0.5


def test_pictures(folder):
    pictures = sorted(path.name for path in folder.glob("*.png"))
    assert pictures == [f"finetune_{name.lower()}.png" for name in sorted(NETWORKS, key=str.lower)]
    assert all((folder / name).read_bytes().startswith(b"\x89PNG") for name in pictures)


@pytest.mark.parametrize("name", NETWORKS)
def test_every_variant_was_trained(result, name):
    net = result["networks"][name]
    assert list(net["variants"]) == EVERYWHERE + (FLOATING if name == "ViT" else [])
    original = net["variants"]["original"]
    for row in net["variants"].values():
        (run,) = row["runs"]
        assert [point["update"] for point in run["curve"]] == [2, 4]
        assert all(0 <= point["accuracy"] <= 100 and 0 < point["loss"] < 5 for point in run["curve"])
        assert run["curve"][0]["loss"] != run["curve"][1]["loss"]
        assert row["accuracy"] == run["curve"][-1]["accuracy"]
        assert row["difference"] == row["accuracy"] - original["accuracy"]
    deployed = {key: row["deployed"] for key, row in net["variants"].items() if row["deployed"]}
    assert list(deployed) == [key for key in net["variants"] if key not in ("original", "additive", "float_dual")]
    assert abs(deployed["stay"]["loss"]) < abs(deployed["bits_0"]["loss"])
    assert net["first_task"]["start"].keys() == {"examples", "cosine", "agreement"}
    assert net["first_task"]["start"]["cosine"] > 0.99
    assert net["met"] == (net["variants"][result["default"]]["difference"] >= -0.5)


@pytest.mark.parametrize("name", NETWORKS)
def test_all_begin_as_the_original_but_the_additive_one(result, name):
    """The first two updates have the same batches and weights, so that a faithful network's loss is the original's."""
    losses = {key: row["runs"][0]["curve"][0]["loss"] for key, row in result["networks"][name]["variants"].items()}
    assert losses["stay"] == pytest.approx(losses["original"], abs=0.005)
    assert abs(losses["additive"] - losses["original"]) > 1e-4


@pytest.mark.parametrize("name", NETWORKS)
def test_kept_bits_are_counted(result, name):
    sizes = {key: row["activation_bytes"] for key, row in result["networks"][name]["variants"].items()}
    assert sizes["stay"][0] == sizes["stay"][1] == sizes["bits_0"][0]
    assert sizes["original"][0] == sizes["original"][1]
    assert sizes["bits_0"][1] <= sizes["bits_2"][1] <= sizes["bits_4"][1] <= sizes["stay"][1]
