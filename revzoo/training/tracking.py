"""What a run measures, sent to TensorBoard, MLflow, Weights & Biases, Comet or Aim by Accelerate's trackers.

Each gets the settings of the recipe as parameters, and under the names of metrics.jsonl the metrics of every epoch and, between
them, loss and learning rate. Their steps are updates.
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
    """Send what was measured by an update. A tracker whose server fails must not end a training of days."""
    try:
        accelerator.log(record, step=record["updates"])
    except Exception as error:  # of a tool of others, which may raise anything
        _logger.warning("A tracker fails (%s: %s). metrics.jsonl has every epoch.", type(error).__name__, error)
