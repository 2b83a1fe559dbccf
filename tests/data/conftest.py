"""Shorthands for loading data, and for comparing what is loaded."""

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch

from revzoo.data.base import Data
from revzoo.data.loading import load_data
from revzoo.data.options import DataOptions, TextOptions
from revzoo.errors import DataError
from revzoo.spec.schema import ImageInput, Input

GREY = ImageInput("image", 1, (8, 8))


@pytest.fixture
def options() -> Callable[..., DataOptions]:
    """Return a function that makes the `data` section of a recipe for texts."""

    def make(name: str, root: Path | None = None, tokenizer: Path | None = None, **more) -> DataOptions:
        text = TextOptions(tokenizer=None if tokenizer is None else str(tokenizer))
        return DataOptions(name, **{"batch_size": 4, "root": None if root is None else str(root), "text": text, **more})

    return make


@pytest.fixture
def refusal() -> Callable[..., str]:
    """Return a function that loads data and returns the message with which they are refused."""

    def load(options: DataOptions, input: Input = GREY, processes: int = 1) -> str:
        with pytest.raises(DataError) as caught:
            load_data(options, input, 0, processes)
        return str(caught.value)

    return load


@pytest.fixture
def load(request: pytest.FixtureRequest) -> Callable[..., Data]:
    """Return a function that loads a folder of the kind that a module of tests calls KIND, for grey images of 8x8 pixels."""

    def load(root: Path, name: str = request.module.KIND, input: Input = GREY, processes: int = 1, **options) -> Data:
        return load_data(DataOptions(name, **{"batch_size": 4, "root": str(root), **options}), input, 0, processes)

    return load


@pytest.fixture
def refused(load: Callable[..., Data]) -> Callable[..., str]:
    """Return a function that loads a folder as `load` does and returns the message with which it is refused."""

    def refuse(root: Path, **options) -> str:
        with pytest.raises(DataError) as caught:
            load(root, **options)
        return str(caught.value)

    return refuse


@pytest.fixture(scope="session")
def epoch() -> Callable[..., list]:
    """Return a function that lists the training batches of an epoch."""

    def read(data: Data, number: int, skip: int = 0) -> list:
        data.start_epoch(number, skip)
        return list(data.train)

    return read


@pytest.fixture(scope="session")
def same() -> Callable[..., bool]:
    """Return a function that tells whether two loaders, or lists of batches, hold the same examples, and some."""

    def compare(one: Iterable, other: Iterable) -> bool:
        pairs = list(zip(one, other, strict=True))
        return bool(pairs) and all(torch.equal(a, b) and torch.equal(i, j) for (a, i), (b, j) in pairs)

    return compare
