"""Two processes read tars, and data sets of Hugging Face; one goes on in the middle of an epoch."""

import json
import shlex
import shutil
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from revzoo.training import loop
from revzoo.training.loop import resume, train
from revzoo.training.recipe import load_recipe
from revzoo.training.run_folder import RunFolder

SMALL = "model.overrides=[stem.width=8,stages.0.width=8,stages.0.depth=1,block.f.heads=2]"
RECIPE = [SMALL, "data.shift=0", "train.epochs=2", "train.save_every=2", "train.keep_states=20", "schedule.warmup_epochs=0"]
MEASURED = {"seconds", "images_per_second", "memory_bytes"}


def draw(number: int) -> bytes:
    """Return an image of noise."""
    file = BytesIO()
    Image.fromarray(np.random.default_rng(number).integers(0, 256, (8, 8), dtype=np.uint8)).save(file, "PNG")
    return file.getvalue()


def write_tars(root: Path, write_tar: Callable[[Path, dict[str, bytes]], Path]) -> None:
    """Write 26 images for training, which are 6 batches of 4, and 7 for validation, which are one and three quarters."""
    for name, numbers in (("train-0", range(20)), ("train-1", range(20, 26)), ("val-0", range(30, 37))):
        files = {
            f"{n}.{suffix}": draw(n) if suffix == "png" else str(n % 3).encode() for n in numbers for suffix in ("png", "cls")
        }
        write_tar(root / f"{name}.tar", files)


def write_dataset(root: Path) -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(image=datasets.Image(), label=datasets.Value("int64"))
    splits = {"train": range(26), "validation": range(30, 37)}
    for name, numbers in splits.items():
        rows = {"image": [{"bytes": draw(n), "path": None} for n in numbers], "label": [n % 3 for n in numbers]}
        datasets.Dataset.from_dict(rows, features).to_parquet(root / f"{name}.parquet")


def read_records(folder: Path) -> list[dict]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if key not in MEASURED} for line in lines]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["wds", "hfds"])
def test_two_processes_share_the_examples(name, tmp_path, write_tar, monkeypatch, launch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache", raising=False)
    monkeypatch.setattr(loop, "describe_memory", lambda run: "")  # which takes longer than these runs
    monkeypatch.setattr(loop, "describe_gradients", lambda run: "")
    root = tmp_path / "data"
    write_tars(root, write_tar) if name == "wds" else write_dataset(root)
    data = [f"data.name={name}", f"data.root={root}", "data.num_workers=1"]
    words = ["digits", *RECIPE, *data, "data.batch_size=2", "--out", "shared"]
    launch(f"torchrun --nproc-per-node 2 -m zoo_cli train {shlex.join(words)}")
    shared, alone = tmp_path / "shared", tmp_path / "alone"
    train(load_recipe("digits", [*RECIPE, *data, "data.batch_size=4"]), alone)
    expected = read_records(alone)
    assert [record["updates"] for record in expected] == [6, 12]
    assert read_records(shared) == [pytest.approx(record, abs=1e-5) for record in expected]
    for state in ("00001-0000004", "00002-0000000"):
        shutil.rmtree(shared / "state" / state)
    assert RunFolder(shared).find_state().name == "00001-0000002"
    resume(shared)  # in the second epoch, after its second update
    assert read_records(shared) == [pytest.approx(record, abs=1e-5) for record in expected]
