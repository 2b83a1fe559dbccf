"""A recipe that trains in a second, and folders of images."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from accelerate.state import AcceleratorState, GradientState
from PIL import Image

from revzoo.training.recipe import Recipe, load_recipe

SMALL = "stem.width=8,stages.0.width=8,stages.0.depth=2,block.f.heads=2,block.drop_path.max=0.2,head.dropout=0.1"
# Four batches an epoch.
FAST = ["data.batch_size=320", "train.epochs=2", "schedule.warmup_epochs=1", f"model.overrides=[{SMALL}]"]


@pytest.fixture(autouse=True)
def _fresh_accelerate() -> Iterator[None]:
    """Accelerate keeps the first precision and accumulation it was given for the rest of the process."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture
def fast() -> list[str]:
    """Overrides that make any recipe for digits small."""
    return list(FAST)


@pytest.fixture
def recipe() -> Callable[..., Recipe]:
    """Return the digits recipe, made small, with further overrides."""
    return lambda *overrides: load_recipe("digits", [*FAST, *overrides])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Eight grey images of noise in two classes; validation has the same ones."""
    dice = np.random.default_rng(0)
    for label in ("cat", "dog"):
        for i in range(4):
            pixels = Image.fromarray(dice.integers(0, 256, (8, 8), dtype=np.uint8))
            for split in ("train", "val"):
                path = tmp_path / "images" / split / label / f"{i}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                pixels.save(path)
    return tmp_path / "images"
