"""Plans of networks on one tensor, and of chains of layers: they never take more than is predicted from a few schedules."""

from typing import Any

import pytest
import torch
from torch import nn

import revzoo
from benchmarks.pixel_terms import bytes_per_pixel
from revzoo.errors import BudgetError, InputError
from revzoo.invertible import CoupledConv2d, InvertibleBatchNorm2d, InvertibleLeakyReLU
from revzoo.planning.planner import enforce_budget
from revzoo.planning.profiling.count import count
from revzoo.planning.profiling.hooks import list_units
from revzoo.planning.solvers.schedule_totals import cost, peak
from revzoo.runtime import LayerChain, ReversibleChain, SpaceToDepth
from tests.planning.test_count import measured

NETWORKS = {
    "layerwise_digits": [],
    "resnext_digits": ["stages.1.depth=1", "stages.2.depth=1"],
    "revnext_digits": ["stages.1.depth=1"],
}

# The inverted layers of a run are predicted where they take most; only a count knows which ones get halves of the channels.
MOST = {"layerwise_digits": 1.12, "revnext_digits": 1.06}


def agrees(model: nn.Module, batch: Any, drawn: list[list[str]], most: float = 1.0) -> None:
    """Assert that FLOPs of schedules are counted as they are measured, and peaks too, or up to `most` times as high."""
    problem, (_, stored) = count(model, batch), measured(model, batch, "store")
    for modes in drawn:
        peak_bytes, flops = measured(model, batch, modes)
        assert flops == stored + cost(problem, modes), modes
        assert peak_bytes <= peak(problem, modes) <= most * peak_bytes, modes


@pytest.fixture
def chain() -> LayerChain:
    """Return a chain in which every kind of layer comes before and behind every other."""
    return LayerChain(
        CoupledConv2d(8, 3),
        InvertibleBatchNorm2d(8),
        InvertibleLeakyReLU(0.5),
        SpaceToDepth(2),
        CoupledConv2d(32, 3),
        InvertibleBatchNorm2d(32),
        nn.Conv2d(32, 32, 3, padding=1),
        InvertibleBatchNorm2d(32),
        InvertibleLeakyReLU(0.5),
        CoupledConv2d(32, 3),
    )


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_have_what_random_schedules_take(name, schedules):
    model = revzoo.create(name, overrides=NETWORKS[name])
    inverted = ["invert" if unit.can_invert else "store" for unit in list_units(model)]
    drawn = [*schedules(model, 4), inverted, ["store"] * len(inverted)]
    agrees(model, model.example_input(8), drawn, MOST.get(name, 1.0))


def plan_budgets(model: nn.Module, batch: Any, most: float) -> list[revzoo.Plan]:
    """Return plans from the smallest peak to the largest; the last is counted. Assert that each takes what it promises."""
    profile = revzoo.profile(model, batch, run=False)
    loosest = peak(profile.memory, profile.memory.all_stored)
    least = revzoo.solve(profile, loosest).min_peak_bytes
    plans = [revzoo.solve(profile, budget) for budget in (least, (least + loosest) // 2, loosest)]
    assert plans[0].peak_bytes == least < plans[-1].peak_bytes == loosest
    plans.append(enforce_budget(model, batch, profile, plans[1]))
    for plan in plans:
        model.schedule = plan
        taken = revzoo.measure_memory(model, batch).peak_bytes
        assert plan.peak_bytes / (1.0 if plan is plans[-1] else most) <= taken <= plan.peak_bytes <= plan.budget_bytes
    return plans


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_have_what_plans_promise_at_any_budget(name):
    model = revzoo.create(name, overrides=NETWORKS[name])
    x = model.example_input(8)
    plan_budgets(model, x, MOST.get(name, 1.0))
    terms = bytes_per_pixel(model, x)  # counts the same training step, without what lasts
    assert terms.counted_bytes == revzoo.measure_memory(model, x).activation_bytes
    assert terms.stages[terms.peak_stage].total_bytes == terms.counted_bytes


def test_a_budget_that_inverting_everything_fits_is_enough():
    """Although more is predicted."""
    model = revzoo.create("layerwise_digits")
    x = model.example_input(8)
    least, _ = measured(model, x, "invert")
    plan = revzoo.plan(model, x, least)
    assert plan.peak_bytes == plan.budget_bytes == plan.min_peak_bytes == least
    assert measured(model, x, plan)[0] == least
    with pytest.raises(BudgetError, match="No schedule fits"):
        revzoo.plan(model, x, least - 1)


def test_a_unit_that_passes_its_input_on_has_a_backward_of_its_own():
    model = revzoo.create("resnext_digits", overrides=NETWORKS["resnext_digits"])
    problem = count(model, model.example_input(2))
    fuse, last = problem.units[-2], problem.units[-3]
    assert fuse.name == "fuse"
    assert {option.cost for option in fuse.options} == {0}
    assert [option.mode for option in last.options if option.cost] == ["recompute"]


def test_a_chain_of_layers_has_what_schedules_take_and_plans_promise(chain, schedules):
    x = torch.randn(4, 8, 8, 8)
    assert [unit.name for unit in list_units(chain) if not unit.can_invert] == ["6"]  # has no inverse
    agrees(chain, x, schedules(chain, 4), 1.03)
    assert "invert" in plan_budgets(chain, x, 1.03)[0].schedule


def test_a_chain_of_layers_in_a_chain_of_layers_cannot_be_planned(chain):
    nested = LayerChain(nn.Sequential(*chain), nn.Flatten())
    with pytest.raises(InputError, match=r"has one mode. Received: layer 0, a Sequential of layers .* these layers themselves"):
        revzoo.profile(nested, torch.randn(4, 8, 8, 8))


def test_steps_made_of_a_chain_of_layers_have_what_schedules_take(schedules):
    def unit() -> LayerChain:
        return LayerChain(CoupledConv2d(8), InvertibleBatchNorm2d(8), InvertibleLeakyReLU(0.5))

    steps = ReversibleChain([unit(), unit(), unit()])
    agrees(steps, (torch.randn(2, 8, 8, 8), torch.randn(2, 8, 8, 8)), schedules(steps, 3))
