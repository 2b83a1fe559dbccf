"""Plans that choose tiles together with modes: their bytes, when whole steps are better, and what they are applied to."""

from copy import deepcopy
from dataclasses import replace
from functools import partial

import pytest
import torch

import revzoo
from revzoo.errors import BudgetError, InputError
from revzoo.planning import planner
from revzoo.planning.plan import Plan
from revzoo.runtime import LayerChain, ReversibleChain


@pytest.fixture
def chain(mlp) -> ReversibleChain:
    """Return a chain of wide steps, which are most of what backward holds."""
    steps = [mlp(8) for _ in range(3)]
    for step in steps:
        step.acts_on = "tokens"
    return ReversibleChain(steps)


X = tuple(torch.linspace(-1, 1, 512).view(2, 1, 32, 8).sin().unbind())


@pytest.fixture(autouse=True)
def untimed(monkeypatch):
    """Costs are counted: a plan follows from model and budget alone, and is made sooner."""
    monkeypatch.setattr(planner, "profile", partial(planner.profile, run=False))
    monkeypatch.setattr(planner, "_time_step", lambda model, batch, plan, loss: plan)


def choose(monkeypatch, tiles: int) -> None:
    """Have every step cut into this number of tiles, without counting."""

    def choose_tiles(model, batch, loss):
        assert set(model.schedule) == {"invert"}
        model.tiles = tiles

    monkeypatch.setattr(planner, "choose_tiles", choose_tiles)


def find_ends(model, batch) -> tuple[int, int]:
    """Return the smallest peak of whole steps, and that of storing everything."""
    plan = revzoo.plan(model, batch, "1TiB")
    return plan.min_peak_bytes, plan.no_recompute_peak_bytes


def test_below_the_least_of_whole_steps(chain, tmp_path):
    least, _ = find_ends(chain, X)
    chain.schedule = before = ["store", "invert", "recompute"]
    plan = revzoo.plan(chain, X, least - 1, tiles="auto")
    assert (chain.schedule, chain.tiles) == (before, [1] * 3)
    assert plan.min_peak_bytes < plan.peak_bytes < least
    assert (plan.schedule, plan.setting.tiles) == (("recompute", "recompute", "store"), (8, 8, 1))  # what is stored is whole
    assert "on cpu, 2 steps in 8 tiles\n" in str(plan)
    chain.schedule = plan
    assert chain.tiles == [*plan.setting.tiles]
    assert revzoo.measure_memory(chain, X).peak_bytes == plan.peak_bytes
    assert revzoo.verify(chain, X).ok
    chain.tiles, chain.schedule = 3, "invert"
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    loaded.apply(chain, X)
    assert chain.tiles == [*plan.setting.tiles]
    revzoo.plan(chain, X, "1TiB").apply(chain)  # of the tiles that are set
    assert chain.tiles == [*plan.setting.tiles]


def test_where_everything_can_be_stored_steps_stay_whole(chain, monkeypatch):
    monkeypatch.setattr(planner, "choose_tiles", None)
    _, stored = find_ends(chain, X)
    chain.tiles = 2
    plan = revzoo.plan(chain, X, stored, tiles="auto")
    assert (plan.setting.tiles, set(plan.schedule), plan.peak_bytes) == ((1,) * 3, {"store"}, stored)
    assert chain.tiles == [2] * 3
    chain.schedule = plan
    assert revzoo.measure_memory(chain, X).peak_bytes == stored


def test_the_faster_of_both_is_taken(chain, monkeypatch):
    choose(monkeypatch, 4)
    budget, _ = find_ends(chain, X)
    whole, best = revzoo.plan(chain, X, budget), revzoo.plan(chain, X, budget, tiles="auto")
    assert best.extra_flops < whole.extra_flops
    assert best.min_peak_bytes < whole.min_peak_bytes == budget
    chain.schedule = best
    assert revzoo.measure_memory(chain, X).peak_bytes == best.peak_bytes <= budget
    monkeypatch.setattr(planner, "_time_step", lambda model, *args: replace(args[1], seconds=float(max(model.tiles))))
    timed = revzoo.plan(chain, X, budget, tiles="auto")
    assert (timed.schedule, timed.setting, timed.seconds) == (whole.schedule, whole.setting, 1.0)
    assert timed.min_peak_bytes == best.min_peak_bytes


@pytest.mark.slow
def test_every_family_takes_what_is_planned(family):
    x = family.example_input(2)
    least, stored = find_ends(family, x)
    plan = revzoo.plan(family, x, least + (stored - least) // 8, tiles="auto")
    assert len(plan.setting.tiles) >= len(plan.units)
    family.schedule = plan
    assert revzoo.measure_memory(family, x).peak_bytes == plan.peak_bytes <= plan.budget_bytes


def test_without_values(chain, monkeypatch):
    choose(monkeypatch, 2)
    least, _ = find_ends(chain, X)
    plan = revzoo.plan(deepcopy(chain).to("meta"), [x.to("meta") for x in X], least - 1, tiles="auto")
    chain.schedule = plan
    assert revzoo.measure_memory(chain, X).peak_bytes == plan.peak_bytes < least


def test_what_does_not_fit_names_the_least_with_tiles(chain, monkeypatch):
    choose(monkeypatch, 2)
    chain.tiles = 2
    least, _ = find_ends(chain, X)
    chain.tiles = before = [1, 2, 3]
    with pytest.raises(BudgetError, match=rf"\({least} bytes\) are needed, .* optimizer of less state\.$"):
        revzoo.plan(chain, X, least - 1, tiles="auto")
    assert (chain.tiles, chain.schedule) == (before, ["invert"] * 3)
    choose(monkeypatch, 1)  # none help
    with pytest.raises(BudgetError, match=r"optimizer of less state\.$"):
        revzoo.plan(chain, X, least - 1, tiles="auto")
    with pytest.raises(BudgetError, match="tiles='auto'"):
        revzoo.plan(chain, X, least // 2)


@pytest.mark.parametrize("settings", [{"solver": "knapsack"}, {"lookahead": 1}, {"tiles": 4}])
def test_what_tiles_do_not_go_with_is_refused(settings, chain):
    with pytest.raises(InputError, match="'auto' with solver='timeline' and lookahead=0"):
        revzoo.plan(chain, X, "1GiB", **{"tiles": "auto", **settings})


def test_modules_without_reversible_steps_are_refused():
    with pytest.raises(InputError, match="Linear is no model of the zoo and no chain: .* tiles='auto'"):
        revzoo.plan(torch.nn.Linear(8, 8), torch.randn(2, 8), "1GiB", tiles="auto")
    layers = LayerChain(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 8))
    with pytest.raises(InputError, match="this LayerChain has none"):
        revzoo.plan(layers, torch.randn(64, 8), 1000, tiles="auto")
