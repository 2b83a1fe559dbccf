"""Plans of networks on one tensor, and of chains of layers: what is counted from a few schedules holds for every other one."""

from typing import Any

import pytest
import torch
from torch import nn

import revzoo
from revzoo.analysis.dry_run import isolated
from revzoo.analysis.flops import FlopCounter
from revzoo.errors import InputError
from revzoo.invertible import CoupledConv2d, InvertibleBatchNorm2d, InvertibleLeakyReLU
from revzoo.planning.profiling.count import count, list_traced_schedules
from revzoo.planning.profiling.hooks import list_units
from revzoo.planning.profiling.trace import trace
from revzoo.planning.solvers.problem import reprice
from revzoo.planning.solvers.schedule import cost, list_phase_peaks, peak
from revzoo.runtime import LayerChain, ReversibleChain, SpaceToDepth

NETWORKS = {
    "layerwise_digits": [],
    "resnext_digits": ["stages.1.depth=1", "stages.2.depth=1"],
    "revnext_digits": ["stages.1.depth=1"],
}


def measure(model: nn.Module, batch: Any, modes: object) -> tuple[int, int]:
    """Return the bytes at the peak and the FLOPs of a step that is run."""
    model.schedule = modes
    with FlopCounter() as flops:
        report = revzoo.measure_memory(model, batch)
    return report.peak_bytes, flops.forward + flops.backward


def agrees(model: nn.Module, batch: Any, drawn: list[list[str]]) -> None:
    """Assert that the peak and the FLOPs of these schedules are counted as they are measured."""
    problem, (_, stored) = count(model, batch), measure(model, batch, "store")
    for modes in drawn:
        assert measure(model, batch, modes) == (peak(problem, modes), stored + cost(problem, modes)), modes


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
@pytest.mark.parametrize(("batch", "number"), [(8, 6), pytest.param(32, 30, marks=pytest.mark.slow)])
def test_networks_have_what_random_schedules_take(name, batch, number, schedules):
    model = revzoo.create(name, overrides=NETWORKS[name])
    inverted = ["invert" if unit.can_invert else "store" for unit in list_units(model)]
    agrees(model, model.example_input(batch), [*schedules(model, number), inverted, ["store"] * len(inverted)])


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_have_what_plans_promise_at_any_budget(name):
    model = revzoo.create(name, overrides=NETWORKS[name])
    x = model.example_input(8)
    profile = revzoo.profile(model, x, run=False)
    loosest = peak(profile.memory, ["store"] * len(profile.memory.units))
    least = revzoo.solve(profile, loosest).min_peak_bytes
    plans = [revzoo.solve(profile, least + (loosest - least) * share // 4) for share in range(5)]
    assert plans[0].peak_bytes == least < plans[-1].peak_bytes == loosest
    for plan in plans:
        model.schedule = plan
        assert revzoo.measure_memory(model, x).peak_bytes == plan.peak_bytes <= plan.budget_bytes
        terms = revzoo.bytes_per_pixel(model, x)  # counts the same training step, without what lasts
        assert terms.counted_bytes == revzoo.measure_memory(model, x).activation_bytes
        assert terms.stages[terms.peak_stage].total_bytes == terms.counted_bytes


def test_every_phase_takes_what_is_counted(schedules):
    model = revzoo.create("layerwise_digits")
    x = model.example_input(8)
    problem = count(model, x)
    for modes in schedules(model, 4):
        predicted = [phase.bytes for phase in list_phase_peaks(problem, modes)]
        with isolated(model, x) as inputs:
            traced = trace(model, inputs, modes)
        forward = [traced.peak(span, ()) for _, *span, _ in traced.phases("forward")]
        backward = [traced.peak(span, ()) for _, *span, _ in traced.phases("backward")]
        assert (len(forward), len(backward)) == (14, 14)
        assert predicted[:14] == forward
        # Behind a norm, the predicted growth of errors is a tensor of one number, and so is the error that it explains.
        assert {more - less for more, less in zip(predicted[15:], backward, strict=True)} <= {0, 4, 8}


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
    agrees(chain, x, schedules(chain, 8))
    profile = revzoo.profile(chain, x, run=False)
    loosest = peak(profile.memory, ["store"] * 9)
    least = revzoo.solve(profile, loosest).min_peak_bytes
    plans = [revzoo.solve(profile, least + (loosest - least) * share // 4) for share in range(5)]
    assert "invert" in plans[0].schedule
    assert plans[0].peak_bytes < loosest
    for plan in plans:
        chain.schedule = plan
        assert revzoo.measure_memory(chain, x).peak_bytes == plan.peak_bytes <= plan.budget_bytes


def test_a_chain_of_layers_in_a_chain_of_layers_cannot_be_planned(chain):
    nested = LayerChain(nn.Sequential(*chain), nn.Flatten())
    with pytest.raises(InputError, match=r"has one mode. Received: layer 0, a Sequential of layers .* these layers themselves"):
        revzoo.profile(nested, torch.randn(4, 8, 8, 8))


def test_steps_made_of_a_chain_of_layers_have_what_schedules_take(schedules):
    def unit() -> LayerChain:
        return LayerChain(CoupledConv2d(8), InvertibleBatchNorm2d(8), InvertibleLeakyReLU(0.5))

    steps = ReversibleChain([unit(), unit(), unit()])
    agrees(steps, (torch.randn(2, 8, 8, 8), torch.randn(2, 8, 8, 8)), schedules(steps, 3))


def test_every_layer_is_traced_at_every_place_of_a_run():
    model = revzoo.create("layerwise_digits")
    entries = list_units(model)
    assert len([*list_traced_schedules(entries)]) == 6 + 3 + 5
    problem = count(model, model.example_input(2))
    units = problem.units
    assert [unit.coupled for unit in units] == [None, 3, 3, 3, None, None, 6, 9, 9, 9, None, None, None, None]
    assert [len({option.in_run for option in unit.in_runs}) for unit in units] == [0, *[8] * 11, 1, 0]
    assert len([*list_traced_schedules(list_units(revzoo.create("revnet_digits")))]) == 6
    prices = {"store": 0, "selective": 1, "recompute": 2, "invert": 3, "first": 4}
    priced = reprice(problem, lambda _, variant, __: prices[variant]).units
    assert {(option.in_run.begins, option.cost) for unit in priced[1:-2] for option in unit.in_runs} == {(False, 3), (True, 4)}
    assert {option.mode: option.cost for option in priced[-2].in_runs} == {"store": 0, "selective": 1, "recompute": 2}


def test_exact_models_say_that_layers_are_stored(schedules):
    model = revzoo.create("revnext_digits", overrides=NETWORKS["revnext_digits"])
    assert model.schedule[:4] == ["store", "invert", "invert", "invert"]
    model.exact = True
    assert model.schedule[:4] == ["store", "store", "store", "invert"]
    model.schedule = "invert"
    assert model.schedule[:4] == ["store", "store", "store", "invert"]
    with pytest.raises(revzoo.errors.ScheduleError, match=r"for stem.norm. Received: 'invert'.* Allowed: store, sel"):
        model.schedule = ["store", *["invert"] * 6, "store", "store"]
    agrees(model, model.example_input(8), schedules(model, 3))
