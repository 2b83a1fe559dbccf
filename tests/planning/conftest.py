"""Small models of every family, and schedules to plan them with."""

import random
from collections.abc import Callable

import pytest
from torch import nn

import revzoo
from revzoo.planning.profiling.hooks import list_units

FAMILIES = {
    "irevnet_digits": ["stages.0.depth=1", "stages.1.depth=2"],
    "reformer_mini": ["stages.0.depth=2", "input.length=64"],
    "rev_bert_mini": ["stages.0.depth=1"],
    "rev_mvit_digits": ["stages.1.depth=1"],
    "rev_roberta_mini": ["stages.0.depth=1"],
    "rev_swin_digits": ["stages.0.depth=1", "stages.1.depth=1"],
    "rev_vit_digits": ["stages.0.depth=2"],
    "revnet_digits": ["stages.0.depth=1", "stages.1.depth=1", "stages.2.depth=1"],
    "revnext_digits": ["stages.1.depth=1"],
}


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> revzoo.Model:
    """Return a model of each family, of few blocks."""
    return revzoo.create(request.param, overrides=FAMILIES[request.param])


@pytest.fixture
def tiny() -> revzoo.Model:
    return revzoo.create("rev_vit_digits", overrides=FAMILIES["rev_vit_digits"])


@pytest.fixture
def mlp() -> Callable[[int], nn.Module]:
    def make(width: int = 8) -> nn.Module:
        return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    return make


@pytest.fixture
def schedules() -> Callable[..., list[list[str]]]:
    """Return a function that draws schedules of a model, some of them with long runs of one mode."""

    def draw(model: nn.Module, count: int) -> list[list[str]]:
        rng, schedules = random.Random(count), []
        for i in range(count):
            modes: list[str] = []
            for part in list_units(model):
                menu = ["store", "selective", "recompute"] + ["invert"] * part.can_invert
                stays = modes and modes[-1] in menu and rng.random() < (0, 0.5, 0.8)[i % 3]
                modes.append(modes[-1] if stays else rng.choice(menu))
            schedules.append(modes)
        return schedules

    return draw
