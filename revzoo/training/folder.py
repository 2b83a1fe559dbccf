"""The folder of a run: what is in it, and how it is written so that a killed run can go on.

config.yaml        the recipe, resolved            spec.yaml          the model's spec, resolved
metrics.jsonl      one line per epoch              curves.png         drawn at the end
last.safetensors   weights after the last epoch    best.safetensors   those with the best top-1
state/EPOCH-BATCH/ everything needed to go on from there
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from revzoo.errors import CheckpointError, InputError

FILES = ("config.yaml", "spec.yaml")


@dataclass
class Progress:
    """How far a run has come; all that training needs besides tensors.

    Args:
        loss_sums: of each process, over its `images` images of the epoch under way; a resumed run needs as many processes.
        epoch: epochs completed.
        batch: batches done of the epoch under way, per process.
        updates: optimizer steps done.
        seconds: spent on the epoch under way.
        top1: after the last complete epoch [%].
        best_top1: of all epochs [%], first reached in `best_epoch`.
    """

    loss_sums: list[float]
    epoch: int = 0
    batch: int = 0
    updates: int = 0
    images: int = 0
    seconds: float = 0.0
    top1: float = -1.0
    best_top1: float = -1.0
    best_epoch: int = 0


class RunFolder:
    """Paths of a run and the few things that are written to it besides tensors. Only the main process writes."""

    def __init__(self, path: Path):
        self.path = path
        self.metrics, self.curves = path / "metrics.jsonl", path / "curves.png"
        self.last, self.best = path / "last.safetensors", path / "best.safetensors"
        self.states = path / "state"

    def start(self, files: dict[str, str]) -> None:
        """Make the folder and write its texts by name.

        Raises:
            InputError: the folder holds something already.
        """
        if self.path.is_dir() and any(self.path.iterdir()):
            raise InputError(
                f"The run folder {self.path} is not empty. Go on with that run (--resume {self.path}) or name another (--out)."
            )
        self.states.mkdir(parents=True)
        for name, text in files.items():
            (self.path / name).write_text(text)

    def state(self) -> Path:
        """Return the newest complete state.

        Raises:
            CheckpointError: there is none.
        """
        states = sorted(path for path in self.states.glob("*-*") if path.is_dir())
        if not states:
            raise CheckpointError(f"{self.path} is not the folder of a run: there is no state in {self.states}.")
        return states[-1]

    def read_progress(self) -> Progress:
        """Return the progress of the newest complete state."""
        return Progress(**json.loads((self.state() / "progress.json").read_text()))

    def publish_state(self, written: Path, progress: Progress) -> None:
        """Give a completely written state its name, in one step, and drop older ones."""
        (written / "progress.json").write_text(json.dumps(asdict(progress)))
        place = self.states / f"{progress.epoch:05d}-{progress.batch:07d}"
        if place.exists():
            shutil.rmtree(written)  # the same moment, so the same state
        else:
            written.rename(place)
        for path in self.states.iterdir():
            if path != place:
                shutil.rmtree(path)

    def records(self) -> list[dict[str, Any]]:
        """Return the metrics of all complete epochs."""
        lines = self.metrics.read_text().splitlines() if self.metrics.is_file() else []
        return [json.loads(line) for line in lines]

    def append(self, record: dict[str, Any]) -> None:
        """Add an epoch's metrics."""
        with self.metrics.open("a") as file:
            file.write(json.dumps(record) + "\n")

    def forget_after(self, epoch: int) -> None:
        """Drop the metrics of epochs that the newest state does not include: they are done again."""
        lines = self.metrics.read_text().splitlines(keepends=True) if self.metrics.is_file() else []
        atomically(self.metrics, lambda path: path.write_text("".join(lines[:epoch])))


def atomically(path: Path, write: Callable[[Path], Any]) -> None:
    """Call `write` with a path beside the final one, and move the result into place when it is complete."""
    partial = path.with_name(path.name + ".partial")
    write(partial)
    partial.replace(path)


def free_folder(parent: Path, name: str) -> Path:
    """Return parent/name, or parent/name-2 and so on: the first that does not exist."""
    candidates = [parent / name, *(parent / f"{name}-{n}" for n in range(2, 10_000))]
    return next(path for path in candidates if not path.exists())
