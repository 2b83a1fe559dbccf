"""Trainings that take less than a second, how they are interrupted and killed, and the comparison of what they leave."""

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from revzoo.training.interrupt import Interrupted, StopSignal
from revzoo.training.options import Recipe
from revzoo.training.recipe import load_recipe

SMALL = "stem.width=8,stages.0.width=8,stages.0.depth=1,block.f.heads=2,block.drop_path.max=0.2,head.dropout=0.1"
# Four batches an epoch.
FAST = ["data.batch_size=320", "train.epochs=2", "schedule.warmup_epochs=1", f"model.overrides=[{SMALL}]"]
# Everything that draws random numbers, two updates an epoch.
RANDOM = ["mixup={mixup_alpha: 0.8, cutmix_alpha: 1.0}", "train.accumulate=2"]
CONSTANT = ["schedule.sched=constant", "schedule.warmup_epochs=0"]
MEASURED = {"seconds", "images_per_second", "texts_per_second", "bytes_per_second", "memory_bytes"}  # different in every run


class Killed(BaseException):
    """What nothing catches, as if the process had been killed."""


def make_recipe(*overrides: str) -> Recipe:
    """Return the digits recipe, made small, with further overrides."""
    return load_recipe("digits", [*FAST, *overrides])


def make_image_recipe(folder: Path, *overrides: str) -> Recipe:
    """Return the small recipe for the images in a folder, for one epoch of batches of 4."""
    data = ["data.name=folder", f"data.root={folder}", "data.batch_size=4", "data.shift=0"]
    return make_recipe(*data, "train.epochs=1", "schedule.warmup_epochs=0", *overrides)


@contextmanager
def interrupted(polls: int) -> Iterator[pytest.ExceptionInfo]:
    """Interrupt the training in the block: it asks for signals after every update and every test batch."""
    calls = count(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StopSignal, "poll", lambda self: signal.SIGTERM if next(calls) == polls else 0)
        with pytest.raises(Interrupted) as caught:
            yield caught


@contextmanager
def killed(owner: object, name: str, call: int = 1) -> Iterator[None]:
    """Let the training in the block end in this call of a function, before anything of it has run."""
    original, calls = getattr(owner, name), count(1)

    def kill(*arguments):
        if next(calls) == call:
            raise Killed
        return original(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, kill)
        with pytest.raises(Killed):
            yield


def read_records(folder: Path) -> list[dict]:
    """Return the metrics of a run, without times and memory."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if key not in MEASURED} for line in lines]


def assert_same_weights(one: Path, other: Path) -> None:
    """Compare the weights of two runs bit for bit."""
    for name in ("last.safetensors", "best.safetensors"):
        left, right = load_file(one / name), load_file(other / name)
        assert left.keys() == right.keys()
        assert [key for key in left if not torch.equal(left[key], right[key])] == []


def assert_same_run(one: Path, other: Path) -> None:
    """Compare the metrics and weights of two runs bit for bit."""
    assert read_records(one) == read_records(other)
    assert_same_weights(one, other)
