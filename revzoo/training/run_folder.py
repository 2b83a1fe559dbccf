"""The folder of a run: its files, written so that a killed run can be resumed.

config.yaml        the recipe, resolved            spec.yaml          the model's spec, resolved
metrics.jsonl      one line per epoch              curves.png         drawn at the end
classes.json       names of the classes, in order, where the labels are classes
conversion.json    where every tensor went of a network that was made reversible on the way
tokenizer.json     copy of the tokenizer, for a model of texts
imports.txt        the packages that --import named
last.safetensors   weights after the last epoch    best.safetensors   weights with the best score
plan.json          the plan, for a recipe with a memory budget
tensorboard/       events of TensorBoard, for a recipe that tracks them
state/EPOCH-BATCH/ everything needed to resume from there
state/lock         locked by the process that works in the folder
log/               what processes but the first have to say; unreadable.txt: images that could not be read
"""

import json
import os
import re
import shutil
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import takewhile
from operator import itemgetter
from pathlib import Path
from typing import Any, cast

from filelock import FileLock, Timeout
from safetensors import SafetensorError

from revzoo.bounds import NonNegativeFloat, NonNegativeInt, PositiveInt
from revzoo.checkpoint.files import find_weights
from revzoo.errors import CheckpointError, InputError, RevzooError, join_names, quote
from revzoo.file import parse_json, sync, write_text
from revzoo.format import count_noun
from revzoo.metric import CHOSEN
from revzoo.spec.names import BEST_WEIGHTS, NAME_A_RUN, find_beside, find_inside
from revzoo.spec.parsing import check_value, parse_json_as
from revzoo.training.checksums import find_damage, seal
from revzoo.training.terminal import has_lost_others

RECIPE = "config.yaml"
_STATE_NAME = re.compile(r"\d{5,}-\d{7,}")
_TEMPORARY = re.compile(
    r"\.tmp[A-Za-z0-9]{6}|"
    r"(config\.yaml|spec\.yaml|classes\.json|tokenizer\.json|conversion\.json|imports\.txt|metrics\.jsonl|plan\.json|curves\.png|"
    r"[\w-]+\.safetensors(\.index\.json)?)\.partial"
)
_DRAWN = {"epoch", "train_loss", "loss", CHOSEN.key}  # what the curves need of every record
LOCK_SECONDS = 10.0  # a killed run's processes that load data may hold its lock a little longer


@dataclass
class Progress:
    """How far a run has come: everything needed to resume it that is not a tensor.

    Everything is counted over all processes, so that any number of them can go on.

    Args:
        loss_sum: sum of the training losses of the current epoch, over all processes.
        epoch: epochs completed.
        batch: batches of the current epoch that are done; the processes share each.
        updates: optimizer updates done since the beginning.
        examples: examples of the current epoch that are done.
        processes: number of processes that saved the state.
        seconds: time spent on the current epoch.
        score: CHOSEN metric after the last complete epoch.
        best_score: best of all epochs.
        best_epoch: first epoch that reached `best_score`, from 1; 0 before there is one.
        missing: epochs whose metrics are lost, which somebody has accepted.
    """

    loss_sum: NonNegativeFloat = 0.0
    epoch: NonNegativeInt = 0
    batch: NonNegativeInt = 0
    updates: NonNegativeInt = 0
    examples: NonNegativeInt = 0
    processes: PositiveInt = 1
    seconds: NonNegativeFloat = 0.0
    score: NonNegativeFloat = 0.0
    best_score: NonNegativeFloat = 0.0
    best_epoch: NonNegativeInt = 0
    missing: NonNegativeInt = 0


class RunFolder:
    """Paths of a run, and reading and writing of what is not tensors. Only the main process writes."""

    def __init__(self, path: Path):
        self.path = path
        self.metrics, self.curves = path / "metrics.jsonl", path / "curves.png"
        self.last, self.best = path / "last.safetensors", path / BEST_WEIGHTS
        self.states, self.plan = path / "state", path / "plan.json"
        self.lock, self.logs = self.states / "lock", path / "log"
        self._held: os.stat_result | None = None  # of the lock

    def require_free(self) -> None:
        """Check that a new run can be written here.

        Raises:
            InputError: the folder cannot be made, or is not empty.
        """
        if file := next((path for path in (self.path, *self.path.parents) if path.exists() and not path.is_dir()), None):
            raise InputError(f"The run folder {self.path} cannot be made: {file} is a file. Name another (--out).")
        names = {path.name for path in self.path.iterdir()} if self.path.is_dir() else set()
        was_killed = self.lock.is_file() and not names & {RECIPE, self.metrics.name}  # before its first state was complete
        if names and not was_killed:
            raise InputError(
                f"The run folder {self.path} is not empty. Resume that run (--resume {quote(self.path)}) or name another "
                "(--out)."
            )

    @contextmanager
    def hold_lock(self) -> Iterator[None]:
        """Keep other processes out of the folder inside the block: two would mix their epochs and states.

        The operating system releases the lock when its process ends, however it ends.

        Raises:
            InputError: another process holds the lock, or a file of the run is a link.
        """
        for file in (*self.path.glob("*"), *self.states.glob("*"), *self.logs.glob("*")):  # which are written to and deleted
            if file.is_symlink():
                raise InputError(f"{file} is a link, and a run has its files in its own folder. Put there what it leads to.")
        self.states.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self.lock, timeout=LOCK_SECONDS)
        try:
            lock.acquire()
        except Timeout:
            raise InputError(f"{self.path} is in use by another process. Wait until it ends or stop it; then resume.") from None
        self._held = self.lock.stat()
        try:
            yield
        finally:
            lock.release()

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Explain an error that ends the writing of a file inside the block, and make room by removing a half-written state.

        Raises:
            RevzooError: what was written could not be.
        """
        self.require_held()
        try:
            yield
        except (OSError, RuntimeError, SafetensorError) as error:  # a full disk raises any of these
            if has_lost_others(error):
                raise
            self.require_held()
            shutil.rmtree(self.states / "writing", ignore_errors=True)
            raise RevzooError(
                f"Nothing more can be saved in {self.path} ({error}). Is the disk full? What was saved before is complete: "
                f"make room and resume with revzoo train --resume {quote(self.path)}"
            ) from error

    def require_held(self) -> None:
        """Check that the lock that is held is still in the folder: what is written would make another of a deleted one.

        Raises:
            RevzooError: it was deleted, moved or replaced.
        """
        with suppress(OSError):
            if self._held is None or os.path.samestat(self._held, self.lock.stat()):
                return
        raise RevzooError(
            f"{self.path} was deleted, moved or replaced while its run trained, which ends here: nothing can be saved."
        )

    def write(self, files: dict[str, str]) -> None:
        """Write text files, given by name."""
        for name, text in files.items():
            write_text(self.path / name, text)

    def require_run(self) -> None:
        """Check that the folder is that of a run.

        Raises:
            CheckpointError: recipe or spec are missing.
        """
        for name in (RECIPE, "spec.yaml"):
            if not (self.path / name).is_file():
                was_killed = name == RECIPE and self.lock.is_file() and not self.metrics.exists()
                remedy = f" It was killed before anything was trained: start it again, with --out {quote(self.path)}."
                if not was_killed:
                    known = find_inside(str(self.path), RECIPE) if self.path.is_dir() else find_beside(str(self.path))
                    remedy = known or NAME_A_RUN
                raise CheckpointError(f"{self.path} is not the folder of a run: there is no {name} in it.{remedy}")

    def is_begun(self) -> bool:
        """Return whether it says what is trained."""
        return (self.path / RECIPE).is_file()

    def sweep(self) -> None:
        """Remove what a killed run has left: temporary files, and states that were being written, replaced or deleted."""
        for path in self.path.iterdir():
            if _TEMPORARY.fullmatch(path.name) and path.is_file():
                path.unlink()
        for path in list(self.states.iterdir()):
            prefix, _, name = path.name.partition("-")
            if prefix == "replaced" and not (self.states / name).exists():
                path.rename(self.states / name)  # killed before the new one had its name
            elif prefix in ("replaced", "deleted") or path.name == "writing":
                shutil.rmtree(path, ignore_errors=True)

    def find_state(self) -> Path:
        """Return the folder of the newest complete state.

        Raises:
            CheckpointError: there is none.
        """
        states = self.list_states()
        if not states:
            raise CheckpointError(
                f"{self.path} cannot be resumed: there is no state in {self.states}. Start again{self.say_from_weights()}."
            )
        return states[-1]

    def read_progress(self) -> Progress:
        """Return the progress of the newest complete state.

        Raises:
            CheckpointError: there is no state, or its progress file is missing, damaged or of another state.
        """
        state = self.find_state()
        try:
            progress = cast(Progress, parse_json_as(Progress, (state / "progress.json").read_bytes()))
            if _state_name(progress) != state.name or bool(progress.batch) != bool(progress.examples):
                raise ValueError("it is that of another state")
            return progress
        except (OSError, ValueError, TypeError) as error:
            raise self.explain_damage(state / "progress.json", error) from error

    def say_from_weights(self) -> str:
        """Return " from the weights after the last epoch: COMMAND", to end a sentence with; an empty string without weights."""
        config, weights = quote(f"{self.path}/{RECIPE}"), quote(f"model.checkpoint={self.last}")
        command = f"revzoo train {config} {weights}"
        return f" from the weights after the last epoch: {command}" if find_weights(self.last).is_file() else ""

    def explain_damage(self, file: Path, reason: object) -> CheckpointError:
        """Return the error for a file of the newest state that cannot be used; it says how to go on."""
        *earlier, newest = self.list_states()
        remedy = (
            f"Delete {newest} to resume from the state before it" if earlier else "There is no state before it: start again"
        )
        return CheckpointError(f"{file} cannot be used ({textwrap.shorten(str(reason), 300)}). {remedy}.")

    def list_states(self) -> list[Path]:
        """Return the folders of all states, oldest first; anything else in `states` is ignored."""
        return sorted(path for path in self.states.glob("*-*") if _STATE_NAME.fullmatch(path.name) and path.is_dir())

    def set_damaged_states_aside(self) -> list[str]:
        """Rename the damaged ones among the newest states, so that the newest is a whole one; return a sentence for each.

        They stay until the next state is saved.

        Raises:
            CheckpointError: there are states, but none is whole.
        """
        states = self.list_states()
        damaged = dict(takewhile(itemgetter(1), ((state, find_damage(state)) for state in reversed(states))))
        if states and len(damaged) == len(states):
            reasons = "; ".join(f"{state.name}: {damage}" for state, damage in damaged.items())
            text = f"No state in {self.states} can be used ({reasons}). Put one back from a backup, or start again"
            raise CheckpointError(f"{text}{self.say_from_weights()}.")
        for state in damaged:
            shutil.rmtree(self.states / f"damaged-{state.name}", ignore_errors=True)
            state.rename(self.states / f"damaged-{state.name}")
        return [f"The state {state} is damaged ({damage}); the one before it is used." for state, damage in damaged.items()]

    def publish_state(self, written: Path, progress: Progress, keep: int) -> None:
        """Rename a completely written state to its final name, which makes it the newest, and delete all but `keep` states.

        Args:
            written: folder of the files.
            progress: is written, too, and gives the name.
            keep: how many states stay.
        """
        (written / "progress.json").write_text(json.dumps(asdict(progress), allow_nan=False), encoding="utf-8")
        seal(written)
        state = self.states / _state_name(progress)
        replaced = self.states / f"replaced-{state.name}"
        if state.exists():
            state.rename(replaced)
        written.rename(state)
        sync(self.states)
        for path in self.list_states()[:-keep]:
            path.rename(self.states / f"deleted-{path.name}")  # what is half deleted must not look like a state
        for path in [replaced, *self.states.glob("damaged-*"), *self.states.glob("deleted-*")]:
            shutil.rmtree(path, ignore_errors=True)

    def read_records(self) -> list[dict[str, Any]]:
        """Return the metrics of all complete epochs; an unfinished last line is ignored.

        Raises:
            CheckpointError: a line is damaged.
        """
        text = self.metrics.read_text(encoding="utf-8", errors="replace") if self.metrics.is_file() else ""
        return [self._parse_record(number, line) for number, line in enumerate(text.split("\n")[:-1], 1)]

    def _parse_record(self, number: int, line: str) -> dict[str, Any]:
        with suppress(ValueError):
            record = parse_json(line)
            if isinstance(record, dict) and not any(check_value(record.get(key), NonNegativeFloat) for key in _DRAWN):
                return record
        raise CheckpointError(f"Line {number} of {self.metrics} is not the metrics of an epoch. Delete that line to go on.")

    def append_record(self, record: dict[str, Any]) -> None:
        """Add the metrics of an epoch."""
        with self.saving():
            with self.metrics.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record, allow_nan=False) + "\n")
            sync(self.metrics)

    def note_unreadable(self, names: dict[str, list[str]]) -> dict[str, list[str]]:
        """Write names of what could not be read, by split; return those that had not been written before."""
        file = self.logs / "unreadable.txt"
        known = set(file.read_text(encoding="utf-8").splitlines()) if file.is_file() else set()
        new = {split: fresh for split, all in names.items() if (fresh := [name for name in all if name not in known])}
        if new:
            with self.saving():
                self.logs.mkdir(exist_ok=True)
                with file.open("a", encoding="utf-8") as stream:
                    stream.writelines(f"{name}\n" for fresh in new.values() for name in fresh)
        return new

    def keep_records(self, progress: Progress, *, accept: bool = False) -> str:
        """Return the metrics without those of later epochs, which a resumed run does again.

        Args:
            progress: how far the run has come.
            accept: whether epochs may have lost their metrics, which the progress then says, or have them twice.

        Raises:
            CheckpointError: the metrics are missing or damaged.
        """
        done = range(1, progress.epoch + 1)
        records = [record for record in self.read_records() if record["epoch"] in done]
        numbers, kept = [record["epoch"] for record in records], {record["epoch"]: record for record in records}
        if accept:
            progress.missing = progress.epoch - len(kept)
        elif numbers != sorted(kept) or len(numbers) != progress.epoch - progress.missing:
            raise CheckpointError(
                f"{self.metrics} should hold the metrics of {count_noun(progress.epoch, 'epoch')}, a line each, in order. "
                f"Received: {join_names(list(map(str, numbers)), most=6) or 'none'}. Put it back, or go on without them with "
                "--accept-changes."
            )
        return "".join(json.dumps(kept[number]) + "\n" for number in sorted(kept))


def _state_name(progress: Progress) -> str:
    return f"{progress.epoch:05d}-{progress.batch:07d}"


def name_run(recipe_file: str) -> str:
    """Return the name of a run by a recipe: that of its file, or of the folder of the run whose recipe it is."""
    path = Path(recipe_file)
    return (path.parent.name if path.name == RECIPE else "") or path.stem


def claim_free_folder(parent: Path, name: str) -> RunFolder:
    """Make the first of parent/name, parent/name-2, parent/name-3 ... that does not exist; no two processes get the same one.

    Raises:
        InputError: the parent is a file, or in one.
    """
    number = 1
    while True:
        folder = RunFolder(parent / (name if number == 1 else f"{name}-{number}"))
        number += 1
        if not folder.path.exists():
            folder.require_free()
            with suppress(FileExistsError):  # another process was faster
                folder.path.mkdir(parents=True)
                return folder
