"""The benchmark of networks made reversible in place: at toy size everything is measured, drawn and gone on with."""

import json
import math
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

FILE = Path(__file__).parents[2] / "benchmarks" / "finetune_llm.py"
METHODS = {"stored", "checkpointed", "8 bits", "4 bits", "split", "split, 4 bits"}
SIMILAR = ("9 bits", "8 bits", "4 bits", "2 bits", "bfloat16")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("peft") is None, reason="LoRA is peft's"),
    pytest.mark.skipif(shutil.which("apt-cache") is None, reason="the texts are Debian's"),
]


def run(folder, *options):
    command = [sys.executable, "-W", "error", str(FILE), "--quick", "--out", str(folder), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads((folder / "finetune_llm.json").read_text())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("finetune_llm")


@pytest.fixture(scope="module")
def measured(folder):
    return run(folder)


@pytest.fixture
def parts(measured):
    return measured[1]


def test_every_part_says_where_and_how_it_was_measured(measured, folder):
    text, parts = measured
    assert list(parts) == ["memory", "time", "similarity", "accuracy"]
    for part in parts.values():
        assert part["command"] == "python benchmarks/finetune_llm.py --quick --out DIR".replace("benchmarks", str(FILE.parent))
        assert part["versions"].keys() == {"python", "torch", "revzoo"}
    for word in ("checkpointed", "same neighbour", "deployed"):
        assert word in text
    assert (folder / "finetune_llm.png").read_bytes().startswith(b"\x89PNG")


def test_the_blocks_keep_what_was_computed(parts):
    """Four blocks: checkpointing keeps an input of each; reversible ones two states of 4 bytes, and the bits of all but one.

    The last state is kept by the norm behind the blocks, too; in half precision that is a copy. Llama also keeps its rotations.
    """
    elements = 2 * 16 * 16
    rotations = {4: 16 * 8 + 2 * 16 * 4 * 4, 2: 16 * 8 + 2 * 16 * 4 * 2}
    for net, name, size in zip(parts["memory"]["rows"], ("Llama", "GPT-2", "Llama"), (4, 4, 2), strict=True):
        assert (net["network"], net["dtype"]) == (name, {4: "float32", 2: "bfloat16"}[size])
        methods = {row["method"]: row for row in net["methods"]}
        others = rotations[size] if name == "Llama" else 0
        assert methods["checkpointed"]["block_bytes"] == 4 * size * elements + others
        pair = 4 if size == 4 else 8
        assert methods["8 bits"]["block_bytes"] == (pair + 3) * elements + others
        assert methods["4 bits"]["block_bytes"] == (2 * pair + 3) * elements // 2 + others
        assert methods["split"]["block_bytes"] == (pair + 7) * elements + others
        assert methods["split, 4 bits"]["block_bytes"] == (2 * pair + 7) * elements // 2 + others
        assert methods["4 bits"]["blocks_of_checkpointed"] < methods["8 bits"]["blocks_of_checkpointed"]
        assert all(row["missed"] == [] for row in net["methods"])


def test_times_and_similarity(parts):
    for row in parts["time"]["rows"]:
        assert row["of_checkpointed"]["checkpointed"] == 1
        assert row["seconds"].keys() == row["of_checkpointed"].keys() == METHODS
    rows = parts["similarity"]["rows"]
    sizes = [(row["tokens"], row["passages"], row["method"]) for row in rows]
    assert sizes == [(length, 8, name) for length in (8, 16) for name in SIMILAR]
    assert all(0.9999 < row["least_cosine"] <= row["cosine"] <= 1 for row in rows)
    assert [row.get("met") for row in rows] == [True, True, None, None, None] * 2
    for nine, eight, four, two, _ in (rows[:5], rows[5:]):
        assert nine["cosine"] > eight["cosine"] > four["cosine"] > two["cosine"]


def test_a_changed_neighbour_comes_with_its_margin(monkeypatch):
    monkeypatch.syspath_prepend(FILE.parent)
    from finetune_llm_minilm import compare_embeddings

    def turn(*degrees):
        angles = torch.tensor(degrees, dtype=torch.float64).deg2rad()
        return torch.stack([angles.cos(), angles.sin()], 1)

    alike = compare_embeddings(turn(0, 10, 21, 90), turn(0, 11, 21, 90))  # 10 is nearer to 0, and 11 to 21
    assert alike["agreement"] == 0.75
    assert alike["cosine"] == pytest.approx((3 + math.cos(math.radians(1))) / 4, abs=1e-12)
    assert alike["least_cosine"] == pytest.approx(math.cos(math.radians(1)), abs=1e-12)
    assert alike["margin"] == pytest.approx(math.cos(math.radians(10)) - math.cos(math.radians(11)), abs=1e-12)
    same = compare_embeddings(turn(0, 10, 21), turn(0, 10, 21))
    assert (same["agreement"], same["margin"]) == (1, 0)


def test_all_learn_from_the_same_batches(parts):
    runs = {(run["training"], run["method"]): run for run in parts["accuracy"]["runs"]}
    assert len(runs) == 6
    for training in ("full", "LoRA"):
        original, checkpointed, reversible = (runs[training, name] for name in ("original", "checkpointed", "reversible"))
        assert checkpointed["losses"] == original["losses"]
        assert checkpointed["accuracy"] == original["accuracy"]
        assert checkpointed["kept_bytes"] < original["kept_bytes"]
        assert reversible["losses"] != original["losses"]
        assert reversible["losses"] == pytest.approx(original["losses"], abs=1e-4)
        assert {"deployed", "agreement"} <= reversible.keys()
    summary = [(row["training"], row["method"]) for row in parts["accuracy"]["summary"]]
    assert summary == [(t, m) for t in ("full", "LoRA") for m in ("original", "checkpointed", "reversible", "deployed")]


def test_a_second_run_goes_on_where_the_first_ended(measured, folder):
    file = folder / "finetune_llm.json"
    parts = json.loads(file.read_text())
    removed = parts["accuracy"]["runs"].pop(2)
    parts["accuracy"]["runs"][0]["seconds"] = -1.0
    file.write_text(json.dumps(parts))
    _, after = run(folder, "--only", "accuracy")
    assert [part for part in after if after[part] != parts[part]] == ["accuracy"]
    first, _, third, *_ = after["accuracy"]["runs"]
    assert first["seconds"] == -1.0
    assert {**third, "seconds": 0} == {**removed, "seconds": 0}
