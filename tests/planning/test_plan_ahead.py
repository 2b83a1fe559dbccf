"""Plans with look-ahead: made without it for less, counted with it, timed with it."""

import re
from dataclasses import replace

import pytest
import torch

import revzoo
from revzoo.errors import BudgetError, InputError, PlanError
from revzoo.planning.plan import Plan
from revzoo.planning.profiling.count import count_peak

BATCH = 64


@pytest.fixture
def x(tiny) -> torch.Tensor:
    return tiny.example_input(BATCH)


@pytest.fixture(scope="module")
def serial() -> Plan:
    """Return the plan of a model like `tiny` at half of the range, made without look-ahead; nothing is run."""
    model = revzoo.create("rev_vit_digits", overrides=["stages.0.depth=2"], device="meta")
    x = model.example_input(BATCH)
    ends = revzoo.plan(model, x, "8GiB")
    return revzoo.plan(model, x, (ends.min_peak_bytes + ends.no_recompute_peak_bytes) // 2)


def measured(model, batch, modes, lookahead=1) -> int:
    model.schedule, model.lookahead = modes, lookahead
    return revzoo.measure_memory(model, batch).peak_bytes


def test_what_it_takes_is_counted_in_every_family(family, schedules):
    x = family.example_input(2)
    (modes,) = schedules(family, 1)
    assert count_peak(family, x, modes, lookahead=1) == measured(family, x, modes)


def test_every_plan_takes_what_it_promises(serial, tiny, x):
    least = count_peak(tiny, x, ["invert" if "blocks" in name else "recompute" for name in tiny.units], lookahead=1)
    budgets = range(least, serial.no_recompute_peak_bytes, (serial.no_recompute_peak_bytes - least) // 2)
    model = revzoo.create("rev_vit_digits", overrides=["stages.0.depth=2"], device="meta")
    plans = [revzoo.plan(model, model.example_input(BATCH), budget, lookahead=1) for budget in budgets]
    assert len({plan.schedule for plan in plans}) >= 2
    for plan in plans:
        plan.apply(tiny, x)
        assert (tiny.schedule, tiny.lookahead) == (list(plan.schedule), 1)
        assert revzoo.measure_memory(tiny, x).peak_bytes == plan.peak_bytes <= plan.budget_bytes


def test_a_plan_without_it_takes_it_away(serial, tiny):
    tiny.lookahead = 1
    tiny.schedule = serial
    assert tiny.lookahead == 0


def test_saved_and_printed(serial, tmp_path):
    plan = replace(serial, lookahead=1)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert ", with look-ahead; " in str(plan)
    assert "look-ahead" not in str(serial)
    replace(plan, lookahead=2).save(tmp_path / "plan.json")
    with pytest.raises(PlanError, match="not a saved plan"):
        Plan.load(tmp_path / "plan.json")


def test_a_budget_that_only_serial_recovery_fits_is_refused(serial, tiny, x):
    """The smallest one that is named is enough."""
    tiny, x = tiny.to("meta"), x.to("meta")
    with pytest.raises(BudgetError, match=r"at least .* lookahead=0") as refused:
        revzoo.plan(tiny, x, serial.min_peak_bytes, lookahead=1)
    least = int(re.search(r"\((\d+) bytes\)", str(refused.value))[1])
    plan = revzoo.plan(tiny, x, least, lookahead=1)
    assert plan.peak_bytes == plan.min_peak_bytes == least


@pytest.mark.parametrize("lookahead", [2, True, "auto"])
def test_it_is_0_or_1(lookahead, tiny, x):
    with pytest.raises(InputError, match=r"lookahead is 0 or 1, .* Received: "):
        revzoo.plan(tiny, x, "8GiB", lookahead=lookahead)


def test_planned_and_run(serial, tiny, x):
    plan = revzoo.plan(tiny, x, serial.budget_bytes, lookahead=1)
    tiny.schedule = plan
    assert tiny.lookahead == 1
    assert plan.seconds > 0
    assert revzoo.measure_memory(tiny, x).peak_bytes == plan.peak_bytes <= serial.budget_bytes
