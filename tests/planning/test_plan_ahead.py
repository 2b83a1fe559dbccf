"""Plans with look-ahead: what it takes is counted, what it gains is timed, and the model is given both."""

from dataclasses import replace

import pytest
import torch

import revzoo
from revzoo.errors import BudgetError, InputError, PlanError
from revzoo.format import format_seconds
from revzoo.planning import planner
from revzoo.planning.plan import Plan
from revzoo.planning.planner import enforce_budget, plan_from_profile
from revzoo.planning.profiling.clock import Median
from revzoo.planning.profiling.profile import Profile
from revzoo.planning.profiling.timing import Timing
from revzoo.planning.solvers.timeline import minimize_peak

BATCH = 64


@pytest.fixture
def x(tiny) -> torch.Tensor:
    return tiny.example_input(BATCH)


@pytest.fixture(scope="module")
def profile() -> Profile:
    """Return the profile of a model like `tiny`, with look-ahead counted."""
    model = revzoo.create("rev_vit_digits", overrides=["stages.0.depth=2"])
    return revzoo.profile(model, model.example_input(BATCH), run=False, lookahead=True)


@pytest.fixture(scope="module")
def timed(profile) -> Profile:
    extra = dict.fromkeys(("selective", "recompute", "invert", "first"), 1000) | {"store": 0}
    units = len(profile.memory.units)
    return replace(profile, timing=Timing(1.0, (0.1,) * units, (extra,) * units, 0.0, 1))


@pytest.fixture
def takes(monkeypatch):
    """Return a function that sets the seconds of training steps with and without look-ahead."""

    def set_seconds(ahead: float, serial: float = 1.0) -> None:
        def measure(model, batch, schedules, loss=None):
            return [Median(ahead if depth else serial, 0.02) for _, depth in schedules]

        monkeypatch.setattr(planner, "measure_step_seconds", measure)

    return set_seconds


@pytest.fixture
def budget(profile) -> int:
    """Return a budget within the range, above what look-ahead needs at least."""
    stored = revzoo.solve(profile, "8GiB").no_recompute_peak_bytes
    return (minimize_peak(replace(profile.problem, lookahead=1))[0] + stored) // 2


def test_every_plan_takes_what_it_promises(profile, tiny, x):
    ends = revzoo.solve(profile, "8GiB", lookahead=1)
    assert ends.min_peak_bytes > revzoo.solve(profile, "8GiB").min_peak_bytes
    budgets = range(
        ends.min_peak_bytes, ends.no_recompute_peak_bytes, (ends.no_recompute_peak_bytes - ends.min_peak_bytes) // 4
    )
    plans = [revzoo.solve(profile, budget, lookahead=1) for budget in budgets]
    assert len({plan.schedule for plan in plans}) >= 3
    for plan in plans:
        plan.apply(tiny, x)
        assert (tiny.schedule, tiny.lookahead) == (list(plan.schedule), 1)
        assert revzoo.measure_memory(tiny, x).peak_bytes == plan.peak_bytes <= plan.budget_bytes


def test_a_plan_without_it_takes_it_away(profile, tiny):
    tiny.lookahead = 1
    tiny.schedule = revzoo.solve(profile, "8GiB")
    assert tiny.lookahead == 0


def test_saved_and_printed(profile, budget, tmp_path):
    plan = revzoo.solve(profile, budget, lookahead=1)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert ", with look-ahead; " in str(plan)
    assert "look-ahead" not in str(revzoo.solve(profile, budget))
    replace(plan, lookahead=2).save(tmp_path / "plan.json")
    with pytest.raises(PlanError, match="its look-ahead is neither 0 nor 1"):
        Plan.load(tmp_path / "plan.json")


def test_a_profile_has_to_count_it(profile):
    with pytest.raises(InputError, match=r'with lookahead 0 or 1. Received: \'auto\'. revzoo.plan takes "auto" too.'):
        revzoo.solve(profile, "8GiB", lookahead="auto")
    model = revzoo.create("rev_vit_digits", overrides=["stages.0.depth=1"])
    plain = revzoo.profile(model, model.example_input(2), run=False)
    with pytest.raises(InputError, match=r"Make it with revzoo.profile\(model, batch, lookahead=True\)"):
        revzoo.solve(plain, "8GiB", lookahead=1)
    with pytest.raises(InputError, match=r"lookahead is 0 or 1, .* or \"auto\". Received: 2."):
        revzoo.plan(model, model.example_input(2), "8GiB", lookahead=2)


def test_what_fits_only_without_it_is_named(profile):
    without, least = (minimize_peak(replace(profile.problem, lookahead=depth))[0] for depth in (0, 1))
    with pytest.raises(
        BudgetError, match=rf"\({least} bytes\) are needed, .* Without look-ahead \(lookahead=0\) .* are enough"
    ):
        revzoo.solve(profile, least - 1, lookahead=1)
    assert without < least


@pytest.mark.parametrize(("seconds", "kept"), [(0.9, 1), (0.99, 0), (1.1, 0)])
def test_the_faster_is_kept(seconds, kept, timed, tiny, x, budget, takes):
    takes(seconds)
    plan = plan_from_profile(tiny, x, timed, budget, lookahead="auto")
    expected = enforce_budget(tiny, x, timed, revzoo.solve(timed, budget, lookahead=kept))
    note = f"A training step takes {format_seconds(seconds)} with look-ahead, 1 s without."
    assert plan == replace(expected, seconds=(1.0, seconds)[kept], spread=0.02, notes=(*expected.notes, note))


def test_asked_for_it_is_timed_alone(timed, tiny, x, budget, takes):
    takes(3.0)
    plan = plan_from_profile(tiny, x, timed, budget, lookahead=1)
    assert (plan.lookahead, plan.seconds) == (1, 3.0)


def test_where_only_serial_recovery_fits_that_is_planned(timed, tiny, x, takes):
    takes(0.1)
    least = minimize_peak(timed.problem)[0]
    plan = plan_from_profile(tiny, x, timed, least, lookahead="auto")
    assert (plan.lookahead, plan.peak_bytes) == (0, least)
    assert plan.notes[-1] == "No schedule with look-ahead could be run within the budget."


def test_nothing_is_gained_where_everything_is_stored_or_nothing_is_timed(profile, timed, tiny, x, budget, takes):
    takes(0.1)
    stored = plan_from_profile(tiny, x, timed, "8GiB", lookahead="auto")
    assert (stored.lookahead, set(stored.schedule)) == (0, {"store"})
    counted = plan_from_profile(tiny, x, profile, budget, lookahead="auto")
    assert (counted.lookahead, counted.seconds) == (0, None)
    assert counted.notes[-1] == "Nothing was timed, so nothing shows that look-ahead would gain."
    assert plan_from_profile(tiny, x, profile, budget, lookahead=1).lookahead == 1


def test_planned_and_run(tiny, x, budget):
    plan = revzoo.plan(tiny, x, budget, lookahead="auto")
    assert plan.notes[-1].startswith("A training step takes ")
    tiny.schedule = plan
    assert tiny.lookahead == plan.lookahead
    assert revzoo.measure_memory(tiny, x).peak_bytes == plan.peak_bytes <= budget
