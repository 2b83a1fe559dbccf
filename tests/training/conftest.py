"""A recipe that trains in a second."""

from collections.abc import Callable, Iterator

import pytest
from accelerate.state import AcceleratorState, GradientState

from revzoo.training import loop
from revzoo.training.options import Recipe
from revzoo.training.recipe import load_recipe

SMALL = "stem.width=8,stages.0.width=8,stages.0.depth=2,block.f.heads=2,block.drop_path.max=0.2,head.dropout=0.1"
# Four batches an epoch.
FAST = ["data.batch_size=320", "train.epochs=2", "schedule.warmup_epochs=1", f"model.overrides=[{SMALL}]"]
_SHOWN = {name: getattr(loop, name) for name in ("tabulate_memory", "draw_curves")}


@pytest.fixture(autouse=True)
def _fresh_accelerate() -> Iterator[None]:
    """Accelerate keeps the first precision and accumulation it was given for the rest of the process."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture(autouse=True, scope="module")
def _nothing_shown() -> Iterator[None]:
    """Leave out the table of memory and the curves, which take longer than a small run; `shown` puts them back."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "tabulate_memory", lambda model, batch, optimizer: "")
        patch.setattr(loop, "draw_curves", lambda records, path: path.write_bytes(b""))
        yield


@pytest.fixture
def shown(monkeypatch) -> None:
    """Show everything, as outside of the tests."""
    for name, function in _SHOWN.items():
        monkeypatch.setattr(loop, name, function)


@pytest.fixture
def fast() -> list[str]:
    """Overrides that make any recipe for digits small."""
    return list(FAST)


@pytest.fixture
def recipe() -> Callable[..., Recipe]:
    """Return the digits recipe, made small, with further overrides."""
    return lambda *overrides: load_recipe("digits", [*FAST, *overrides])
