"""What a run measures, sent to TensorBoard, MLflow, Weights & Biases, Comet or Aim by Accelerate's trackers.

Each gets the settings of the recipe as parameters, and the metrics of every epoch under the names of metrics.jsonl.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from revzoo.spec.parsing import to_plain
from revzoo.spec.tree import walk_leaves
from revzoo.training.options import Recipe
from revzoo.training.processes import call_on_main

_PROJECT = "revzoo"  # what tools that gather runs call the group of them
_logger = logging.getLogger("revzoo")


@contextmanager
def open_trackers(accelerator: Accelerator, recipe: Recipe, folder: Path) -> Iterator[None]:
    """Keep the recipe's trackers open inside the block; TensorBoard writes into the run's folder."""
    if not recipe.train.track:
        yield
        return
    accelerator.project_configuration.logging_dir = str(folder / "tensorboard")
    settings = {
        path: value if isinstance(value, bool | int | float) else str(value) for path, value in walk_leaves(to_plain(recipe))
    }
    names = {"mlflow": {"run_name": folder.name}, "wandb": {"name": folder.name, "dir": str(folder)}}
    call_on_main(accelerator, lambda: accelerator.init_trackers(_PROJECT, settings, names))
    try:
        yield
    finally:
        for tracker in accelerator.trackers:  # `end_training` would end the group of the processes, too
            tracker.finish()


def log_record(accelerator: Accelerator, record: dict[str, Any]) -> None:
    """Send the metrics of an epoch. A tracker whose server fails must not end a training of days."""
    try:
        accelerator.log(record, step=record["epoch"])
    except Exception as error:  # of a tool of others, which may raise anything
        _logger.warning("A tracker fails (%s: %s). metrics.jsonl has epoch %s.", type(error).__name__, error, record["epoch"])
