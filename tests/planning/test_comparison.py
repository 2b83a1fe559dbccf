"""The schedules that a plan is compared with take what the comparison says."""

from dataclasses import replace
from itertools import pairwise

import pytest
from timm.optim import create_optimizer_v2

import revzoo
from revzoo.planning.comparison import evaluate_budgets, evaluate_uniform_schedules

BATCH = 4


def short() -> revzoo.Model:
    return revzoo.create("rev_vit_digits", overrides=["stages.0.depth=2"], device="meta")


@pytest.fixture(scope="module")
def profile() -> revzoo.Profile:
    model = short()
    return revzoo.profile(model, model.example_input(BATCH), create_optimizer_v2(model, "adamw"))


def test_what_a_plan_is_compared_with_is_what_these_schedules_take(profile):
    model = short()
    beside = evaluate_uniform_schedules(model, profile)
    for label, schedule in (("all stored", "store"), ("all inverted", "invert")):
        model.schedule = schedule
        optimizer = create_optimizer_v2(model, "adamw")
        measured = revzoo.measure_memory(model, model.example_input(BATCH), optimizer).peak_bytes
        assert beside[label]["peak_bytes"] == measured
    assert beside["all stored"]["extra_flops"] == 0 < beside["all inverted"]["extra_flops"]


def test_nothing_is_compared_with_inverting_where_nothing_can_be_inverted_safely(profile):
    unsafe = replace(profile, memory=replace(profile.memory, max_invert_run=0))
    assert list(evaluate_uniform_schedules(short(), unsafe)) == ["all stored"]


def test_other_budgets_go_from_the_smallest_peak_to_the_fastest_schedule(profile):
    plan = revzoo.solve(profile, "1TB")
    points = evaluate_budgets(profile, 9)
    assert points[0]["peak_bytes"] == plan.min_peak_bytes
    assert all(before["peak_bytes"] < after["peak_bytes"] for before, after in pairwise(points))
    assert points[-1]["extra_flops"] == 0
    assert points[-1]["peak_bytes"] <= plan.no_recompute_peak_bytes
    step = (plan.no_recompute_peak_bytes - plan.min_peak_bytes) / 8
    peaks = {revzoo.solve(profile, int(plan.min_peak_bytes + step * i)).peak_bytes for i in range(9)}
    assert {point["peak_bytes"] for point in points} == peaks
