"""The folder of a run: what is in it, and how it is written so that a killed run can go on.

config.yaml        the recipe, resolved            spec.yaml          the model's spec, resolved
metrics.jsonl      one line per epoch              curves.png         drawn at the end
last.safetensors   weights after the last epoch    best.safetensors   those with the best top-1
plan.json          the plan, for a recipe with a memory budget
state/EPOCH-BATCH/ everything needed to go on from there
"""

import json
import re
import shutil
import textwrap
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from revzoo.errors import CheckpointError, InputError
from revzoo.file import write_atomically

FILES = ("config.yaml", "spec.yaml")
_STATE = re.compile(r"\d{5,}-\d{7,}")
_DRAWN = {"epoch", "train_loss", "loss", "top1"}


@dataclass
class Progress:
    """How far a run has come; all that training needs besides tensors.

    Args:
        loss_sums: of each process, over its `examples` of the epoch under way; a resumed run needs as many processes.
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
    examples: int = 0
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
        self.states, self.plan = path / "state", path / "plan.json"

    def check_free(self) -> None:
        """Refuse a folder that cannot be made, or is not empty.

        Raises:
            InputError: it is so.
        """
        if file := next((path for path in (self.path, *self.path.parents) if path.exists() and not path.is_dir()), None):
            raise InputError(f"The run folder {self.path} cannot be made: {file} is a file. Name another (--out).")
        if self.path.is_dir() and any(self.path.iterdir()):
            raise InputError(
                f"The run folder {self.path} is not empty. Go on with that run (--resume {self.path}) or name another (--out)."
            )

    def start(self, files: dict[str, str]) -> None:
        """Make the folder and write its texts by name."""
        self.states.mkdir(parents=True)
        for name, text in files.items():
            (self.path / name).write_text(text)

    def state(self) -> Path:
        """Return the newest complete state.

        Raises:
            CheckpointError: there is none.
        """
        states = self._complete()
        if not states:
            raise CheckpointError(f"{self.path} is not the folder of a run: there is no state in {self.states}.")
        return states[-1]

    def read_progress(self) -> Progress:
        """Return the progress of the newest complete state.

        Raises:
            CheckpointError: its file is missing, damaged or of another state.
        """
        state = self.state()
        file = state / "progress.json"
        try:
            progress = Progress(**json.loads(file.read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise self.damaged(file, error) from error
        blank = Progress([0.0])
        kinds = all(type(getattr(progress, f.name)) is type(getattr(blank, f.name)) for f in fields(Progress))
        sums = kinds and progress.loss_sums and all(type(loss) is float for loss in progress.loss_sums)
        if not sums or state.name != _name(progress):
            raise self.damaged(file, "it is not what training wrote")
        return progress

    def damaged(self, file: Path, reason: object) -> CheckpointError:
        """Return the error for a file of the newest state that cannot be used, with the way out."""
        *earlier, newest = self._complete()
        way = f"Delete {newest} to go on from the state before it" if earlier else "There is no state before it: start again"
        return CheckpointError(f"{file} cannot be used ({textwrap.shorten(str(reason), 300)}). {way}.")

    def _complete(self) -> list[Path]:
        """Return the states, oldest first; what else lies in their folder is not ours."""
        return sorted(path for path in self.states.glob("*-*") if _STATE.fullmatch(path.name) and path.is_dir())

    def publish_state(self, written: Path, progress: Progress) -> None:
        """Give a completely written state its name, in one step, and drop older ones."""
        (written / "progress.json").write_text(json.dumps(asdict(progress)))
        place = self.states / _name(progress)
        if place.exists():
            shutil.rmtree(written)  # the same moment, so the same state
        else:
            written.rename(place)
        for path in self._complete():
            if path != place:
                shutil.rmtree(path)

    def records(self) -> list[dict[str, Any]]:
        """Return the metrics of all complete epochs; a last line that was not written to its end is none.

        Raises:
            CheckpointError: a line is damaged.
        """
        text = self.metrics.read_text(errors="replace") if self.metrics.is_file() else ""
        return [self._record(number, line) for number, line in enumerate(text.split("\n")[:-1], 1)]

    def _record(self, number: int, line: str) -> dict[str, Any]:
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if isinstance(record, dict) and all(type(record.get(key)) in (int, float) for key in _DRAWN):
            return record
        raise CheckpointError(f"Line {number} of {self.metrics} is not the metrics of an epoch. Delete that line to go on.")

    def append(self, record: dict[str, Any]) -> None:
        """Add an epoch's metrics."""
        with self.metrics.open("a") as file:
            file.write(json.dumps(record) + "\n")

    def forget_after(self, epoch: int) -> None:
        """Drop the metrics of epochs that the newest state does not include: they are done again.

        Raises:
            CheckpointError: the metrics are missing or damaged.
        """
        if epoch and not self.metrics.is_file():
            raise CheckpointError(
                f"There is no {self.metrics}, the metrics of {epoch} epochs. Put it back, or an empty file to go on."
            )
        kept = [json.dumps(record) + "\n" for record in self.records() if record["epoch"] <= epoch]
        write_atomically(self.metrics, lambda path: path.write_text("".join(kept)))


def _name(progress: Progress) -> str:
    return f"{progress.epoch:05d}-{progress.batch:07d}"


def free_folder(parent: Path, name: str) -> Path:
    """Return parent/name, or parent/name-2 and so on: the first that does not exist."""
    candidates = [parent / name, *(parent / f"{name}-{n}" for n in range(2, 10_000))]
    return next(path for path in candidates if not path.exists())
