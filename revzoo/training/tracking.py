"""Write what a run measures to TensorBoard, MLflow, Weights & Biases, Comet or Aim, by Accelerate's trackers.

Every tool gets the settings of the recipe as parameters and the metrics of every epoch, under the names of metrics.jsonl.
TensorBoard, MLflow and Weights & Biases get recipe, spec and plan as texts and the curves as a picture, too.
"""

import json
import logging
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker, get_available_trackers
from PIL import Image

from revzoo.errors import CheckpointError, RevzooError, quote
from revzoo.file import write_text
from revzoo.spec.parsing import to_plain
from revzoo.spec.tree import walk_leaves
from revzoo.training.options import Recipe

_TEXTS = ("config.yaml", "spec.yaml", "plan.json")  # files of a run's folder
_PROJECT = "revzoo"  # what tools that gather runs call the group of them
_logger = logging.getLogger("revzoo")


def require_trackers(recipe: Recipe) -> None:
    """Check that the packages of the recipe's trackers are installed.

    Raises:
        SpecError: one is missing.
    """
    installed = {str(name) for name in get_available_trackers()}
    missing = [name for name in recipe.train.track if name not in installed]
    if missing:
        allowed = f"trackers whose package is installed: python -m pip install {' '.join(missing).replace('_', '-')}"
        raise recipe.error("train.track", str(list(recipe.train.track)), allowed)


class Tracking:
    """The trackers of a run, in the main process; without any, and in other processes, nothing is done.

    A resumed run goes on in the same run of MLflow and Weights & Biases, and in the same folder of TensorBoard, where what a
    killed run wrote after its newest state is hidden. A tracker that fails during training is left out, and a warning says so.

    Args:
        recipe: the recipe, whose `train.track` names the trackers.
        folder: folder of the run.
        shown: whether this is the main process.
    """

    def __init__(self, recipe: Recipe, folder: Path, shown: bool):
        self._recipe, self._folder = recipe, folder
        self._names = recipe.train.track if shown else ()
        self._trackers: list[GeneralTracker] = []

    @contextmanager
    def open(self, epoch: int) -> Iterator[None]:
        """Keep the trackers open inside the block; so many epochs are done, and later ones will be written.

        Raises:
            RevzooError: a tracker cannot begin, because its server does not answer, for example.
            CheckpointError: the file that says what they call the run is damaged.
        """
        ids, self._trackers = self._read_ids(), []
        try:
            for name in self._names:
                try:
                    self._begin(name, epoch, ids.get(name))
                except Exception as error:  # of a tool of others, which may raise anything
                    raise RevzooError(self._explain(name, error, begun=name in ids)) from error
            if self._trackers:
                ids = {tracker.name: _identify(tracker) for tracker in self._trackers}
                write_text(self._file, json.dumps(ids))
            yield
        finally:
            self._call_each(lambda tracker: tracker.finish())

    def log(self, record: dict[str, Any]) -> None:
        """Write the metrics of an epoch."""
        self._call_each(lambda tracker: tracker.log(record, step=record["epoch"]))

    def show(self, picture: Path, epoch: int) -> None:
        """Write a picture, at the end of an epoch."""
        self._call_each(lambda tracker: _send_picture(tracker, picture, epoch))

    def _begin(self, name: str, epoch: int, id: str | None) -> None:
        tracker = self._make(name, epoch, id)
        tracker.start()
        self._trackers.append(tracker)
        if id is None:
            tracker.store_init_configuration(_flatten(self._recipe))
            self._send_texts(tracker)

    def _call_each(self, call: Callable[[GeneralTracker], object]) -> None:
        """Call each tracker; one that fails gets nothing more, and training goes on."""
        for tracker in list(self._trackers):
            try:
                call(tracker)
            except Exception as error:  # of a tool of others, which may raise anything
                self._trackers.remove(tracker)
                metrics, why = self._folder / "metrics.jsonl", _shorten(error)
                _logger.warning("The tracker %s fails (%s) and gets nothing more: %s has it.", tracker.name, why, metrics)

    def _explain(self, name: str, error: Exception, *, begun: bool) -> str:
        """Return why a tracker cannot begin, and what to type instead."""
        anew = f", delete {self._file} to begin a new run there" if begun else ""
        command = f"revzoo train --resume {quote(self._folder)}"
        return (
            f"The tracker {name} cannot begin: {_shorten(error)}. Correct its settings{anew}, and resume: {command}. Or train "
            f"without it: {command} 'train.track=[]'"
        )

    @property
    def _file(self) -> Path:
        return self._folder / "tracking.json"

    def _read_ids(self) -> dict[str, str]:
        """Return what each tool calls the run, by the tool's name; empty for a run that is new to them.

        Raises:
            CheckpointError: the file that says it is damaged.
        """
        if not (self._names and self._file.is_file()):
            return {}
        try:
            ids = json.loads(self._file.read_text(encoding="utf-8"))
        except ValueError:
            ids = None
        if not isinstance(ids, dict) or not all(isinstance(id, str) for id in ids.values()):
            raise CheckpointError(f"{self._file} is damaged. Delete it: the trackers then begin a new run.")
        return ids

    def _send_texts(self, tracker: GeneralTracker) -> None:
        """Send what describes the run, at its beginning."""
        files = [file for name in _TEXTS if (file := self._folder / name).is_file()]
        if tracker.name == "mlflow":
            for file in files:
                tracker.log_artifact(str(file))
        elif tracker.name in ("tensorboard", "wandb"):
            indent = "    " if tracker.name == "tensorboard" else ""  # which shows Markdown: indented text is code
            tracker.log({file.name: textwrap.indent(file.read_text(encoding="utf-8"), indent) for file in files}, step=0)

    def _make(self, name: str, epoch: int, id: str | None) -> GeneralTracker:
        kind = LOGGER_TYPE_TO_CLASS[name]
        if name == "tensorboard":
            return kind("tensorboard", self._folder, purge_step=epoch + 1)
        if name == "mlflow":
            return kind(_PROJECT, run_id=id, run_name=self._folder.name)
        if name == "wandb":
            return kind(_PROJECT, id=id, resume="allow", name=self._folder.name, dir=str(self._folder))
        return kind(_PROJECT)


def _flatten(recipe: Recipe) -> dict[str, Any]:
    """Return the settings of a recipe by their dotted paths; what tools do not take as a value, as text."""
    leaves = walk_leaves(to_plain(recipe))
    return {path: value if isinstance(value, bool | int | float) else str(value) for path, value in leaves}


def _shorten(error: Exception) -> str:
    return textwrap.shorten(f"{type(error).__name__}: {error}", 300).rstrip(".")


def _identify(tracker: GeneralTracker) -> str:
    """Return what a tool calls the run; empty for one that cannot go on with a run, or needs no name for it."""
    if tracker.name == "mlflow":
        return str(tracker.active_run.info.run_id)
    return str(tracker.run.id) if tracker.name == "wandb" else ""


def _send_picture(tracker: GeneralTracker, picture: Path, epoch: int) -> None:
    if tracker.name == "mlflow":
        tracker.log_artifact(str(picture))
    elif tracker.name == "tensorboard":
        with Image.open(picture) as image:
            pixels = np.asarray(image.convert("RGB"))[None]
        tracker.log_images({picture.stem: pixels}, step=epoch, dataformats="NHWC")
    elif tracker.name == "wandb":
        tracker.log_images({picture.stem: [str(picture)]}, step=epoch)
