"""Shorthands for loading texts."""

from collections.abc import Callable
from pathlib import Path

import pytest

from revzoo.data.loading import load_data
from revzoo.data.options import DataOptions, TextOptions
from revzoo.errors import DataError


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

    def load(options: DataOptions, input, processes: int = 1) -> str:
        with pytest.raises(DataError) as caught:
            load_data(options, input, 0, processes)
        return str(caught.value)

    return load
