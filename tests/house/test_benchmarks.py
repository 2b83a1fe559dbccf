"""Every benchmark can be imported and says its options. Each one runs at toy size, and what it counts is within its targets.

Times are not looked at.
"""

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks"
WRITE_A_FILE = ("runtime", "machinery", "lookahead", "training_loop")  # the others write into a folder
# Of two blocks of convolutions: streams at the peak, streams more for each block, and FLOPs over those of plain autograd. The
# forward of a block is 4 convolutions, and its backward is 8.
PEERS = {
    "plain autograd": (19, 8, 1),
    "checkpoint per block": (13, 2, (12 + 3) / 12),  # the last convolution of a block is not run again
    "revzoo store": (19, 8, 1),
    "revzoo recompute": (10, 2, (12 + 2) / 12),
    "revzoo invert": (9, 0, (12 + 4 - 1 / 2) / 12),  # the last convolution of the first step is not run again
    "revzoo exact": (9, 0, (12 + 4 - 1 / 2) / 12),
    "memcnn": (18, 0, (12 + 8) / 12),
    "RevTorch": (14, 0, (12 + 4) / 12),
    "revlib": (14, 0, (12 + 4) / 12),
    "reformer_pytorch": (16, 0, (12 + 4) / 12),
    "xformers": (16, 0, (12 + 4) / 12),
    "FrEIA": (20, 9, 1),
}


def read(result, what, net, method):
    """Return the values of a figure by number of blocks."""
    wanted = (what, net, method)
    return {f["depth"]: f["value"] for f in result["figures"] if (f["what"], f["net"], f["method"]) == wanted}


def check_figures(result):
    counted = [f for f in result["figures"] if f["target"] is not None and "time" not in f["what"] and "[us]" not in f["what"]]
    assert [f for f in counted if f["value"] > f["target"]] == []
    return counted


def check_runtime(result):
    assert {f["what"].partition(",")[0] for f in check_figures(result)} >= {"gradient error", "gradients not bit-identical"}
    for net, states, alone in (("transformer", 4, 13), ("conv", 4, 5)):
        peaks = {m: read(result, "peak activation memory, in streams", net, m) for m in ("invert", "recompute", "checkpoint")}
        assert peaks["invert"][2] == peaks["invert"][3]
        assert states + alone < peaks["invert"][2] < states + alone + 0.2  # norms' statistics are large beside a tiny stream
        assert all(peaks[mode][3] - peaks[mode][2] == pytest.approx(2, abs=1e-9) for mode in ("recompute", "checkpoint"))
    flops = {method: read(result, "FLOPs over stored", "conv", method)[3] for method in ("checkpoint", "recompute", "invert")}
    assert flops == {"checkpoint": 5 / 4, "recompute": pytest.approx(7 / 6), "invert": pytest.approx(4 / 3 - 1 / 36)}


def check_lookahead(result):
    peaks = [read(result, "peak activation memory, in streams", "conv", f"lookahead={depth}")[2] for depth in (0, 1)]
    assert peaks[1] - peaks[0] == pytest.approx(4, abs=0.1)  # three refilled tensors, and a state


def check_planning(result):
    rows = result["rows"]
    assert all(row["took_seconds"] > 0 for row in rows.values())
    assert all(plan["counted_bytes"] == plan["predicted_bytes"] <= plan["budget_bytes"] for plan in rows["peaks"]["plans"])
    assert rows["brute"]["different"] == rows["monotone"]["slower"] == rows["monotone"]["over_budget"] == 0
    assert rows["brute"]["schedules"] > 5000
    for network in rows["ordinary"]["networks"].values():
        assert all(each["counted_bytes"] <= each["predicted_bytes"] for each in network["counted"])


def check_reforwarding(result):
    assert [(row["name"], row["batch"]) for row in result["table"]] == [("alexnet", 2), ("resnet18", 2)]
    assert all(0 < row["planned"] < row["stored"] and 1 <= row["flops"] <= 1.34 for row in result["table"])


def check_published_memory(result):
    rows = {row["variant"]: row["activation_bytes"] for row in result["tables"]["revnet"]["rows"]}
    assert rows["stage inputs"] < rows["published schedule"] < rows["inverted"] < rows["stored"]


def check_bytes_per_pixel(result):
    assert all(row["inverted"]["bytes_per_pixel"] <= row["stored"] for row in result["rows"])
    assert {row["images"] for row in result["whole_sets"]} == {50}


def check_numerics(result):
    assert {point["angle"] for point in result["angles"]["exact"]} == {0}
    assert all(point["angle"] > 0 for name in ("float32", "bfloat16 streams") for point in result["angles"][name])
    assert all(row["store"] == row["invert"] for row in result["accuracies"]["depths"])  # so few updates, so shallow


def check_finetune(result):
    for net in result["networks"].values():
        losses = {key: row["runs"][0]["curve"][0]["loss"] for key, row in net["variants"].items()}
        assert losses["stay"] == pytest.approx(losses["original"], abs=0.005)  # it starts as the original's function
        kept = [net["variants"][key]["activation_bytes"] for key in ("bits_0", "bits_2", "bits_4", "stay")]
        assert [inverted for _, inverted in kept] == sorted(inverted for _, inverted in kept)


def check_finetune_llm(result):
    assert all(row["missed"] == [] for net in result["memory"]["rows"] for row in net["methods"])
    assert all(row["met"] for row in result["similarity"]["rows"] if row["method"] in ("9 bits", "8 bits"))
    runs = {(run["training"], run["method"]): run["losses"] for run in result["accuracy"]["runs"]}
    for training in ("full", "LoRA"):
        assert runs[training, "checkpointed"] == runs[training, "original"]
        assert runs[training, "reversible"] == pytest.approx(runs[training, "original"], abs=1e-4)


def check_peers(result):
    run = [method for method in result["methods"] if method not in result["left_out"]]
    values = {(f["what"], f["net"], f["method"], f["blocks"]): f["value"] for f in result["figures"]}
    for method in set(run) & PEERS.keys():
        peak, slope, flops = PEERS[method]
        stream, base = result["stream_bytes"]["conv"], values["flops", "conv", "plain autograd", 2]
        assert values["peak", "conv", method, 2] / stream == pytest.approx(peak, abs=0.01), method
        assert values["slope", "conv", method, 4] / stream == pytest.approx(slope, abs=0.01), method
        assert values["flops", "conv", method, 2] / base == pytest.approx(flops, abs=1e-12), method
    ours = [method for method in run if method.startswith("revzoo") or method == "plain autograd"]
    assert len(ours) == 8
    assert len(result["checks"]) == 30
    assert {(check, m): row[m] for check, row in result["checks"].items() for m in ours if any(row[m].values())} == {}


CHECKS = {
    "runtime": check_runtime,
    "machinery": check_figures,
    "machinery --stub": lambda result: result["figures"],  # its targets are of larger batches
    "lookahead": check_lookahead,
    "training_loop": check_figures,
    "planning": check_planning,
    "reforwarding": check_reforwarding,
    "published_memory": check_published_memory,
    "pareprop": lambda result: None,
    "bytes_per_pixel": check_bytes_per_pixel,
    "numerics": check_numerics,
    "finetune": check_finetune,
    "finetune_llm": check_finetune_llm,
    "peers": check_peers,
}


IMPORT_ALL = """
import contextlib, importlib, pathlib, sys
for path in sorted(pathlib.Path("benchmarks").glob("*.py")):
    module = importlib.import_module(path.stem)
    if "ArgumentParser(" in path.read_text():
        sys.argv = [str(path), "--help"]
        with contextlib.suppress(SystemExit):
            module.main()
"""


def test_every_benchmark_says_its_options():
    """In one process: most of the time goes into the imports that they share."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(FOLDER)},
    )
    assert done.returncode == 0, done.stderr
    scripts = [path.name for path in sorted(FOLDER.glob("*.py")) if "ArgumentParser(" in path.read_text()]
    assert [line.split()[1] for line in done.stdout.splitlines() if line.startswith("usage: ")] == scripts


@pytest.mark.slow
@pytest.mark.parametrize("case", CHECKS)
def test_a_benchmark_at_toy_size(case, tmp_path):
    name, *options = case.split()
    if name == "finetune_llm" and (find_spec("peft") is None or shutil.which("apt-cache") is None):
        pytest.skip("LoRA is peft's, and the texts are Debian's")
    if "--stub" in options:
        build = "import stub; stub.build(stub.SOURCE.parent / 'build')"
        done = subprocess.run([sys.executable, "-c", build], cwd=ROOT / "tests" / "cuda_stub", capture_output=True, text=True)
        if "Unavailable" in done.stderr:
            pytest.skip(f"the CUDA stub cannot be built: {done.stderr.splitlines()[-1]}")
    options += ["--epochs", "1"] if name == "training_loop" else ["--quick"]
    file = tmp_path / f"{name}.json"
    command = [sys.executable, str(FOLDER / f"{name}.py"), *options, "--out", str(file if name in WRITE_A_FILE else tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(file.read_text())
    for part in [result] if "command" in result else result.values():  # says where and how it was measured
        assert part["command"].startswith("python ")
        assert part["versions"].keys() == {"python", "torch", "revzoo"}
    assert all(picture.read_bytes().startswith(b"\x89PNG") for picture in tmp_path.glob("*.png"))
    CHECKS[case](result)
