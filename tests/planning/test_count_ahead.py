"""With look-ahead, what is counted from eleven schedules holds for every other one: the peak, and that of every backward."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import nn

import revzoo
from revzoo.analysis.dry_run import isolated
from revzoo.errors import InputError
from revzoo.planning.profiling.count import count, count_peak
from revzoo.planning.profiling.hooks import PlannableModel
from revzoo.planning.profiling.trace import trace
from revzoo.planning.solvers.problem import Problem
from revzoo.planning.solvers.schedule import list_phase_peaks, peak
from revzoo.runtime import ReversibleChain, SpaceToDepth

TEXTS = ("reformer", "rev_bert", "rev_roberta")


def count_ahead(model: PlannableModel, batch: object) -> Problem:
    return replace(count(model, batch, lookahead=True), lookahead=1)


def measured(model: PlannableModel, batch: object, modes: list[str], lookahead: int = 1) -> int:
    model.schedule, model.lookahead = modes, lookahead
    return revzoo.measure_memory(model, batch).peak_bytes


def traced_backwards(model: PlannableModel, batch: object, modes: list[str], lookahead: int = 1) -> dict[int, int]:
    """Return the peak within the backward of every unit that has one."""
    with isolated(model, batch) as inputs:
        traced = trace(model, inputs, modes, lookahead=lookahead)
    return {unit: traced.peak(span, ()) for unit, *span, _ in traced.phases("backward")}


def agrees(model: PlannableModel, batch: object, problem: Problem, drawn: list[list[str]]) -> int:
    """Assert that the problem knows all peaks of these schedules; return how many backwards take more than one by one."""
    more = 0
    for modes in drawn:
        assert measured(model, batch, modes) == peak(problem, modes), modes
        predicted = [phase.bytes for phase in reversed(list_phase_peaks(problem, modes)) if phase.phase == "backward"]
        peaks = traced_backwards(model, batch, modes)
        assert peaks == {unit: predicted[unit] for unit in peaks}, modes
        assert len(peaks) >= len(modes) - 1
        more += sum(peaks[unit] > size for unit, size in traced_backwards(model, batch, modes, lookahead=0).items())
    return more


@pytest.mark.parametrize("number", [4, pytest.param(24, marks=pytest.mark.slow)])
def test_every_family_has_what_random_schedules_take(number, family, schedules):
    x, drawn = family.example_input(2), schedules(family, number)
    if family.spec.family == "revnext":
        with pytest.raises(InputError, match=r"layer by layer. Received: stem.norm.*Plan with lookahead=0"):
            count_ahead(family, x)
        return
    problem = count_ahead(family, x)
    if family.spec.family not in TEXTS:
        assert agrees(family, x, problem, drawn) > number
        return
    for modes in drawn:  # a mask of ids is freed with the last step that drops something, and still counted after it
        assert peak(problem, ["recompute", "invert", *modes[2:]]) == measured(family, x, ["recompute", "invert", *modes[2:]])


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_every_mode_beside_every_other(every, mlp):
    """Runs of inverted steps of every length, stored steps in between; most schedules take more than without look-ahead."""
    chain = ReversibleChain([mlp(16) for _ in range(6)])
    x = tuple(torch.randn(2, 4, 9, 16).unbind())
    steps = product(("store", "invert", "recompute", "selective"), ("store", "invert"), ("invert", "store", "recompute"))
    drawn = [["recompute", *modes, "invert", "recompute"] for modes in steps]
    assert len(drawn) == 24
    assert agrees(chain, x, count_ahead(chain, x), drawn[::every]) > len(drawn[::every])


@pytest.mark.parametrize("coupling", ["additive", "momentum", "leapfrog"])
def test_chains_of_any_coupling_and_an_odd_number_of_steps(coupling, schedules, mlp):
    chain = ReversibleChain([mlp() for _ in range(7)], coupling)
    x = tuple(torch.randn(2, 4, 9, 8).unbind())
    agrees(chain, x, count_ahead(chain, x), [["recompute", *modes[1:]] for modes in schedules(chain, 4)])


def test_exact_arithmetic(tiny, schedules):
    tiny.exact = True
    x = tiny.example_input(16)
    agrees(tiny, x, count_ahead(tiny, x), schedules(tiny, 4))


def test_dropout_and_drop_path(schedules):
    model = revzoo.create("rev_vit_digits", overrides=["stages.0.depth=2", "block.drop_path.max=0.2"])
    x = model.example_input(16)
    agrees(model, x, count_ahead(model, x), schedules(model, 3))


def test_a_frozen_stem_is_passed_by(schedules):
    model = revzoo.create("revnet_digits", overrides=["stages.0.depth=1", "stages.1.depth=1", "stages.2.depth=1"])
    model.stem.requires_grad_(False)
    x = model.example_input(2)
    problem = count_ahead(model, x)
    assert all(option.ahead is None for option in problem.units[0].options)
    agrees(model, x, problem, schedules(model, 3))


class Wide(nn.Module):
    """A step whose gradient takes more memory than its forward; where `drops` is set, it saves nothing of its input."""

    def __init__(self, drops: bool):
        super().__init__()
        self.weight, self._drops = nn.Parameter(torch.full((16,), 0.01)), drops

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.relu() if self._drops else x
        return (x[..., None] * self.weight).sum(-1)


@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_gradients_that_take_more_than_a_recovery(drops, every):
    """A rebuilt state is freed where its step has used it, or at once where the step has no use for it."""
    chain = ReversibleChain([Wide(drops) for _ in range(8)])
    x = tuple(torch.randn(2, 4, 9, 8).unbind())
    steps = product(("invert", "store", "recompute"), ("invert", "store"), ("invert", "store", "recompute"))
    drawn = [[first, "invert", "invert", *modes, "invert", "recompute"] for modes in steps for first in ("recompute", "store")]
    assert agrees(chain, x, count_ahead(chain, x), drawn[::every]) > len(drawn[::every])


def test_bijections_that_a_recovery_undoes():
    bijected = [Wide(True), SpaceToDepth(), Wide(True), Wide(False), SpaceToDepth(), Wide(False), Wide(False)]
    chain = ReversibleChain([Wide(False), *bijected])
    x = tuple(torch.randn(2, 2, 2, 8, 8).unbind())
    drawn = [
        ["recompute", "invert", *modes] for modes in product(("invert", "store"), ("invert", "store"), ["invert"], ["store"])
    ]
    drawn += [["recompute", "invert", middle, "invert", "recompute", "store"] for middle in ("invert", "store")]
    assert agrees(chain, x, count_ahead(chain, x), drawn) > 0


def test_the_unit_that_backward_recovers_first():
    """Nothing else is recovered while its own recovery takes most."""

    class Heavy(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + x.detach().repeat(1, 1, 64).sum()

    chain = ReversibleChain([*[nn.Linear(8, 8) for _ in range(4)], Heavy(8, 8)])
    x = tuple(torch.randn(2, 4, 9, 8).unbind())
    agrees(chain, x, count_ahead(chain, x), [["recompute", "invert", "store", last, "invert"] for last in ("invert", "store")])


def test_streams_of_unequal_width(schedules):
    steps = [nn.Sequential(nn.Linear(a, 24), nn.GELU(), nn.Linear(24, b)) for a, b in [(10, 6), (6, 10)] * 3]
    chain = ReversibleChain(steps)
    x = torch.randn(4, 5, 6), torch.randn(4, 5, 10)
    agrees(chain, x, count_ahead(chain, x), [["recompute", *modes[1:]] for modes in schedules(chain, 6)])


def test_bijections_between_steps(schedules):
    def unit(width: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())

    chain = ReversibleChain([unit(2), unit(2), SpaceToDepth(), unit(8), SpaceToDepth(), unit(32), unit(32)])
    x = tuple(torch.randn(2, 2, 2, 8, 8).unbind())
    agrees(chain, x, count_ahead(chain, x), [["recompute", *modes[1:]] for modes in schedules(chain, 6)])


def test_kept_bits_are_used_up_by_the_recovery(schedules):
    bits = "block.coupling={type: momentum, gain: 1.0, kept_bits: 8}"
    model = revzoo.create("rev_vit_digits", overrides=["stages.0.depth=3", bits])
    x = model.example_input(8)
    problem = count_ahead(model, x)
    for modes in schedules(model, 3):
        assert abs(measured(model, x, modes) - peak(problem, modes)) <= 4, modes  # the grid's magnitude
        phases = [phase for phase in reversed(list_phase_peaks(problem, modes)) if phase.phase == "backward"]
        peaks = traced_backwards(model, x, modes)
        assert max(abs(peaks[unit] - phases[unit].bytes) for unit in peaks) <= 4


def test_the_counted_step_of_a_plan_looks_ahead(tiny):
    x, modes = tiny.example_input(64), ["store", "invert", "invert", "recompute", "invert", "store", "store"]
    counted = [count_peak(tiny, x, modes, lookahead=depth) for depth in (0, 1)]
    assert counted == [measured(tiny, x, modes, depth) for depth in (0, 1)]
    assert counted[0] < counted[1]


def test_look_ahead_of_the_model_is_left_as_it_is_and_does_not_count(tiny):
    x = tiny.example_input(2)
    without = count(tiny, x)
    tiny.lookahead = 1
    assert count(tiny, x) == without
    assert tiny.lookahead == 1
    assert count(tiny, x, lookahead=True) != without
