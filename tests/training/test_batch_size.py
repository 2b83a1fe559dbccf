"""`data.batch_size=auto`: the largest batch whose step fits, or the fastest within a budget, chosen once."""

from types import SimpleNamespace

import pytest
from accelerate import Accelerator

from revzoo.errors import BudgetError, DataError, SpecError
from revzoo.planning import budget
from revzoo.training.batch_size import settle_batch_size
from revzoo.training.evaluate_checkpoint import evaluate_checkpoint
from revzoo.training.loop import train
from revzoo.training.memory import count_step
from revzoo.training.planned_step import PlannedStep
from revzoo.training.recipe import load_recipe
from revzoo.training.setup import build_run
from tests.training.runs import make_recipe

MIXED = "mixup={mixup_alpha: 0.8}"


def test_the_largest_batch_that_fits_is_taken_and_written_down(tmp_path, monkeypatch, capsys):
    run = build_run(make_recipe(MIXED), tmp_path / "other", Accelerator(), resumed=False)
    free = count_step(run, 60)
    monkeypatch.setattr(budget, "free_bytes", lambda *_: (free - PlannedStep(run).present_bytes) / 0.9)
    train(make_recipe(MIXED, "data.batch_size=auto", "train.max_updates=1", "schedule.warmup_epochs=0"), tmp_path / "run")
    size = load_recipe(tmp_path / "run").data.batch_size
    assert (size % 2, 0.9 * 60 < size <= 60) == (0, True)
    printed = " ".join(capsys.readouterr().out.split())
    assert f"data.batch_size=auto: {size}, the largest whose step fits the" in printed
    assert "optimizer.lr=0.003 stays, which the recipe has for data.batch_size=48" in printed


@pytest.mark.parametrize(
    ("asked", "size", "reason"),
    [("auto", 144, "the largest with 10 updates in an epoch"), ("auto:16-200", 200, "the most that was asked for")],
)
def test_a_batch_stays_small_enough_to_train(asked, size, reason):
    recipe, [note] = settle_batch_size(make_recipe(f"data.batch_size={asked}"), Accelerator())
    assert recipe.data.batch_size == size
    assert reason in note


def test_within_a_budget_the_fastest_is_taken(tmp_path, monkeypatch):
    """On a device that takes no more time for 20 examples than for one, and then more for each."""
    monkeypatch.setattr(PlannedStep, "plan", lambda step, limit: None)  # any schedule
    monkeypatch.setattr(PlannedStep, "measure_seconds", lambda step, plan: max(1, (len(step._batch) / 20) ** 2))
    run = build_run(make_recipe(), tmp_path, Accelerator(), resumed=False)
    limit = PlannedStep(run, 64).measure_modes(("invert",))[0]["invert"].peak_bytes
    recipe, [note] = settle_batch_size(make_recipe("data.batch_size=auto:20-21", f"memory.budget={limit}"), Accelerator())
    assert recipe.data.batch_size == 20
    assert "the fastest of 20 to 21 within" in note
    with pytest.raises(BudgetError, match=r"A step of 200 examples takes .* What fits: data.batch_size=6\d"):
        settle_batch_size(make_recipe("data.batch_size=auto:200-320", f"memory.budget={limit}"), Accelerator())


def test_where_no_batch_size_is_chosen(tmp_path):
    with pytest.raises(SpecError, match="found 'auto:9-3'; allowed: an integer >= 1 or auto, or auto:LOW-HIGH"):
        make_recipe("data.batch_size=auto:9-3")
    recipe = make_recipe("data.batch_size=auto")
    with pytest.raises(SpecError, match="found 'auto'; allowed: a number, with several processes"):
        settle_batch_size(recipe, SimpleNamespace(num_processes=2))
    train(make_recipe("data.batch_size=320", "train.epochs=1", "schedule.warmup_epochs=0"), tmp_path / "run")
    with pytest.raises(DataError, match="Only training chooses a batch size"):
        evaluate_checkpoint(tmp_path / "run", ["data.batch_size=auto"])
