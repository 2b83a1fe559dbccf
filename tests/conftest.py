"""Settings of the whole suite, one more run after a crash in a library, and small data sets on disk."""

import json
import re
import sys
import tarfile
import threading
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from _pytest.runner import runtestprotocol
from _pytest.terminal import TerminalReporter
from PIL import Image
from torch import nn

# The tests' tensors are tiny: a second thread costs more than it gives, and one thread makes sums repeatable.
torch.set_num_threads(1)
# How a failure says that a process was ended by a signal: a return code, subprocess.run(check=True), torchrun, and our fork().
CRASH = re.compile(
    r"where -(?:6|7|11) = .*returncode$|died with <Signals.SIG(?:ABRT|BUS|SEGV):|Signal \d+ \(SIG(?:ABRT|BUS|SEGV)\) received"
    r"|process \d+: ended by SIG(?:ABRT|BUS|SEGV)$",
    re.MULTILINE,
)


def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool:
    """Run a test once more if a process of its own crashed in a library: threads of gloo do. Nothing else is repeated."""
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    reports = runtestprotocol(item, nextitem=nextitem, log=False)
    if crash := next(filter(None, (CRASH.search(report.longreprtext) for report in reports if report.failed)), None):
        item.user_properties.append(("crash", crash[0].strip()))
        item.session._setupstate.teardown_exact(None)  # what fixtures have kept may be what crashed
        reports = runtestprotocol(item, nextitem=nextitem, log=False)
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def pytest_terminal_summary(terminalreporter: TerminalReporter) -> None:
    for report in (report for reports in terminalreporter.stats.values() for report in reports):
        if getattr(report, "when", "") == "teardown" and (crash := dict(report.user_properties).get("crash")):
            terminalreporter.write_line(f"RAN ONCE MORE {report.nodeid}: {crash}")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def most_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure times in one round. On a busy machine there would be many, and only tests of measuring depend on seconds."""
    monkeypatch.setattr("revzoo.planning.profiling.clock.MOST_ROUNDS", 1)


@pytest.fixture(autouse=True)
def _nothing_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a command of this process has to say does not depend on how long it takes."""
    monkeypatch.setattr("revzoo.display.console.TELL_SECONDS", threading.TIMEOUT_MAX)


@pytest.fixture(autouse=True)
def _fresh_accelerate() -> Iterator[None]:
    """Accelerate keeps the first precision and accumulation it was given for the rest of the process."""
    yield
    if (state := sys.modules.get("accelerate.state")) is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that are drawn, once they are."""
    from matplotlib.figure import Figure

    drawn: list[Any] = []
    save = Figure.savefig

    def save_and_keep(figure: Any, *args: Any, **options: Any) -> None:
        drawn.append(figure)
        save(figure, *args, **options)

    monkeypatch.setattr(Figure, "savefig", save_and_keep)
    return drawn


@pytest.fixture
def perceptron() -> nn.Module:
    """Return Linear-ReLU-Linear without biases; with 512 rows of 256 floats every activation has 512 KiB."""
    return nn.Sequential(nn.Linear(256, 256, bias=False), nn.ReLU(), nn.Linear(256, 256, bias=False))


@pytest.fixture
def convolutions() -> nn.Module:
    """Return a network whose forward changes state: BatchNorm its buffers, dropout the random generator."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(8 * 6 * 6, 4)
    )


@pytest.fixture
def image_folder(tmp_path: Path) -> Path:
    """Eight grey images of noise in two classes; validation has the same ones."""
    rng = np.random.default_rng(0)
    for label in ("cat", "dog"):
        for i in range(4):
            pixels = Image.fromarray(rng.integers(0, 256, (8, 8), dtype=np.uint8))
            for split in ("train", "val"):
                path = tmp_path / "images" / split / label / f"{i}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                pixels.save(path)
    return tmp_path / "images"


@pytest.fixture(scope="session")
def write_tar() -> Callable[[Path, dict[str, bytes]], Path]:
    """Return a function that writes files into a tar, in order."""

    def write(path: Path, files: dict[str, bytes]) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(path, "w") as tar:
            for name, content in files.items():
                member = tarfile.TarInfo(name)
                member.size = len(content)
                tar.addfile(member, BytesIO(content))
        return path

    return write


@pytest.fixture
def tar_folder(image_folder: Path, tmp_path: Path, write_tar: Callable[[Path, dict[str, bytes]], Path]) -> Path:
    """The images of the image folder, in the same order, in three tars for training and one for validation."""
    for split, size in (("train", 3), ("val", 8)):
        images = sorted((image_folder / split).rglob("*.png"))
        for first in range(0, len(images), size):
            files = {}
            for image in images[first : first + size]:
                key = f"{image.parent.name}/{image.stem}"
                files |= {f"{key}.png": image.read_bytes(), f"{key}.cls": f"{image.parent.name}\n".encode()}
            write_tar(tmp_path / "tars" / f"animals-{split}-{first // size:04d}.tar", files)
    return tmp_path / "tars"


@pytest.fixture
def saved_dataset(image_folder: Path, tmp_path: Path) -> Path:
    """The images of the image folder, in the same order, as `save_to_disk` writes a data set of Hugging Face."""
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(image=datasets.Image(), label=datasets.ClassLabel(names=["cat", "dog"]))
    splits = {}
    for split, name in (("train", "train"), ("val", "validation")):
        images = sorted((image_folder / split).rglob("*.png"))
        rows = {
            "image": [{"bytes": image.read_bytes(), "path": image.name} for image in images],
            "label": [image.parent.name for image in images],
        }
        splits[name] = datasets.Dataset.from_dict(rows, features=features)
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "saved")
    return tmp_path / "saved"


@pytest.fixture
def story(tmp_path: Path) -> Path:
    """A text of 1,000 bytes, no two windows of which are alike."""
    file = tmp_path / "story.txt"
    file.write_text("".join(f"{i:04d}" for i in range(250)))
    return file


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    """A folder of tables with quotation marks, texts of several lines, and texts that look like missing values."""
    folder = tmp_path / "tables"
    folder.mkdir()
    animals = [(f"a cat purrs {i} times", "cat") for i in range(7)] + [(f'the dog\nbarks "{i}" times', "dog") for i in range(7)]
    lines = [f'"{text.replace(chr(34), 2 * chr(34))}",{label}' for text, label in [*animals, ("NA", "cat"), ("007", "dog")]]
    (folder / "train.csv").write_text("\n".join(["text,label", *lines]))
    rows = [{"text": "the cat purrs", "label": "cat"}, {"text": "a dog", "label": "dog"}, {"text": "cat", "label": "cat"}]
    (folder / "test.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


@pytest.fixture
def tokenizer(tables: Path, tmp_path: Path) -> Path:
    """A byte-level tokenizer of 280 tokens, trained on the tables."""
    from revzoo.data.tokenizer import train_tokenizer

    file = tmp_path / "tokenizer.json"
    assert train_tokenizer([tables / "train.csv"], 280, file) == (280, 1)
    return file


@pytest.fixture
def causal(tmp_path: Path) -> Path:
    """The spec of a small network that may predict the next byte."""
    file = tmp_path / "causal.yaml"
    file.write_text("""
name: causal
family: test
input: {kind: text, length: 16, vocabulary: 256}
stem: {type: token_embed, width: 16}
split: duplicate
block: {coupling: additive, f: {type: shared_qk_attention, heads: 2, dropout: 0.1}, g: mlp}
stages: [{depth: 1, width: 16}]
fuse: {type: mean, norm: none}
head: {type: token_linear, outputs: 256}
""")
    return file
