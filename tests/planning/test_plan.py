"""Plans: within the budget, as fast as it allows, only for what they were made for, and the same from a file."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

import revzoo
from revzoo.analysis.dry_run import accumulated_gradients
from revzoo.errors import BudgetError, InputError, PlanError, ScheduleError, UnknownNameError
from revzoo.planning import planner
from revzoo.planning.plan import Plan
from revzoo.planning.planner import enforce_budget
from revzoo.planning.profiling.profile import Profile
from revzoo.planning.solvers import timeline
from revzoo.planning.solvers.schedule_totals import cost
from revzoo.planning.solvers.timeline import find_schedule
from revzoo.runtime import ReversibleChain


@pytest.fixture
def x(tiny) -> torch.Tensor:
    return tiny.example_input(8)


@pytest.fixture(scope="module")
def profile() -> Profile:
    """Return the profile of a model like `tiny`; it does not depend on values."""
    model = revzoo.create("rev_vit_digits", overrides=["stages.0.depth=2"])
    return revzoo.profile(model, model.example_input(8), run=False)


@pytest.fixture
def middle(profile) -> Plan:
    """Return a plan for half of the range."""
    plan = revzoo.solve(profile, "8GiB")
    return revzoo.solve(profile, (plan.min_peak_bytes + plan.no_recompute_peak_bytes) // 2)


def test_more_budget_is_never_slower_and_never_over(profile, tiny, x):
    ends = revzoo.solve(profile, "8GiB")
    step = (ends.no_recompute_peak_bytes - ends.min_peak_bytes) // 16
    plans = [revzoo.solve(profile, budget) for budget in range(ends.min_peak_bytes, ends.no_recompute_peak_bytes + step, step)]
    assert len(plans) >= 17
    costs = [cost(profile.problem, plan.schedule) for plan in plans]
    assert costs == sorted(costs, reverse=True)
    assert all(plan.peak_bytes <= plan.budget_bytes for plan in plans)
    assert (plans[0].peak_bytes, costs[-1], plans[-1].extra_flops) == (ends.min_peak_bytes, 0, 0)
    assert (set(ends.schedule), ends.peak_bytes) == ({"store"}, ends.no_recompute_peak_bytes)
    assert ends.notes[-1].startswith("Everything is stored: the budget is above the ")
    assert len(set(costs)) > 5
    for plan in plans[::4]:
        tiny.schedule = plan
        assert revzoo.measure_memory(tiny, x).peak_bytes == plan.peak_bytes


def test_steps_cut_into_tiles_need_less_and_what_is_planned(profile, tiny, x):
    tiny.tiles = 4
    cut = revzoo.profile(tiny, x, run=False)
    ends = revzoo.solve(cut, "8GiB")
    assert ends.min_peak_bytes < revzoo.solve(profile, "8GiB").min_peak_bytes
    span = ends.no_recompute_peak_bytes - ends.min_peak_bytes
    for part in range(4):
        tiny.schedule = plan = revzoo.solve(cut, ends.min_peak_bytes + span * part // 4)
        assert revzoo.measure_memory(tiny, x).peak_bytes == plan.peak_bytes
    needed, tiny.tiles = tiny.tiles, 1
    tiny.schedule = plan
    assert tiny.tiles == [*plan.setting.tiles] == needed
    assert revzoo.measure_memory(tiny, x).peak_bytes == plan.peak_bytes


def test_where_everything_can_be_stored_nothing_is_timed(profile, tiny, x):
    """With one byte less, schedules have to be timed."""
    stored = revzoo.solve(profile, "8GiB").peak_bytes
    ample, tight = (revzoo.plan(tiny, x, budget, lookahead=1) for budget in (stored, stored - 1))
    assert (set(ample.schedule), ample.peak_bytes, ample.seconds) == ({"store"}, stored, None)
    assert set(tight.schedule) > {"store"}
    assert tight.seconds > 0


def test_a_plan_tells_how_far_from_the_fastest_it_may_be(profile, middle, monkeypatch):
    assert not any("could be saved" in note for note in middle.notes)
    monkeypatch.setattr(timeline, "_MANY", 1)
    plan = revzoo.solve(profile, middle.budget_bytes)
    gap = find_schedule(profile.problem, middle.budget_bytes).gap
    assert gap > 0
    assert plan.notes[-1].startswith(f"Of the work added to storing everything, at most {100 * gap:.2g} % could be saved:")
    assert plan.notes[-1] in str(plan)


def test_accumulated_gradients_are_there_all_the_time(tiny, x):
    profile = revzoo.profile(tiny, x, run=False)
    plan = revzoo.plan(tiny, x, "1GiB", accumulate=True)
    with accumulated_gradients(tiny):
        accumulated = revzoo.profile(tiny, x, run=False)
        tiny.schedule = plan
        assert revzoo.measure_memory(tiny, x).peak_bytes == plan.peak_bytes
    assert accumulated.memory.fixed_bytes - profile.memory.fixed_bytes == sum(p.nbytes for p in tiny.parameters())
    assert plan.min_peak_bytes > revzoo.solve(profile, "1GiB").min_peak_bytes
    assert all(p.grad is None for p in tiny.parameters())
    with pytest.raises(InputError, match=r"models of the zoo and chains. Received: Linear"):
        revzoo.plan(nn.Linear(8, 8), torch.randn(2, 8), "1GiB", accumulate=True)


def test_below_the_minimum_the_minimum_is_named(profile):
    least = revzoo.solve(profile, "8GiB").min_peak_bytes
    with pytest.raises(
        BudgetError, match=rf"at least .* \({least} bytes\) are needed, .* Try a smaller batch, autocast, or an"
    ):
        revzoo.solve(profile, least - 1)
    assert revzoo.solve(profile, least).peak_bytes == least


def test_gradients_under_a_plan_are_those_of_the_stored_run(middle, tiny, x):
    tiny.exact = True
    plan = replace(middle, setting=replace(middle.setting, exact=True))
    grads = []
    for schedule in ("store", plan):
        tiny.schedule = schedule
        tiny.zero_grad()
        tiny(x).square().sum().backward()
        grads.append([p.grad for p in tiny.parameters()])
    assert len({*middle.schedule} - {"store"}) > 0
    assert all(map(torch.equal, *grads))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda model: model.eval(), "training mode: True in the plan, False now"),
        (lambda model: revzoo.create("rev_vit_digits"), "hash of the model's parts, sizes and frozen parameters: "),
        (lambda model: revzoo.create("revnet_digits"), "model: rev_vit_digits in the plan, revnet_digits now"),
    ],
)
def test_it_is_refused_elsewhere_with_the_reason(change, reason, middle, tiny):
    model = change(tiny)
    before = model.schedule
    with pytest.raises(
        PlanError, match=rf"This plan was made for other circumstances .*{reason}.* make a new one with revzoo\.plan"
    ):
        model.schedule = middle
    assert model.schedule == before


def test_another_batch_or_autocast_is_refused(middle, tiny, x):
    with pytest.raises(PlanError, match=r"batch: \[8, 1, 8, 8\] float32 in the plan, \[9, 1, 8, 8\] float32 now"):
        middle.apply(tiny, tiny.example_input(9))
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(PlanError, match="float32 in the plan, float32, autocast bfloat16 now"),
    ):
        middle.apply(tiny, x)
    with pytest.raises(PlanError, match="This plan has other units than the model. Make a new one"):
        replace(middle, units=("stem",) * 7).apply(tiny)


def test_saved_and_loaded_it_is_the_same(middle, tiny, tmp_path):
    middle = replace(middle, notes=("one", "two"), max_invert_run=3)
    middle.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == middle
    tiny.schedule = loaded
    assert tiny.schedule == list(middle.schedule)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"schedule": ["store"], "units": ["stem"]}', "\x00\xff"])
def test_what_is_no_plan_is_named(content, tmp_path):
    (tmp_path / "plan.json").write_text(content)
    with pytest.raises(PlanError, match=r"plan\.json is not a saved plan \(.*\)\. revzoo plan NAME .*--out FILE writes one\."):
        Plan.load(tmp_path / "plan.json")
    with pytest.raises(PlanError, match=r"nowhere\.json is not a saved plan \(.*No such file"):
        Plan.load(tmp_path / "nowhere.json")


@pytest.mark.parametrize(
    "damage",
    [
        lambda facts: facts["schedule"].pop(),
        lambda facts: facts["schedule"].__setitem__(0, "sotre"),
        lambda facts: facts.pop("setting"),
        lambda facts: facts.update(surplus=1),
        lambda facts: facts["setting"].update(batch=None),
    ],
)
def test_a_damaged_plan_changes_nothing(damage, middle, tiny, tmp_path):
    middle.save(tmp_path / "plan.json")
    facts = json.loads((tmp_path / "plan.json").read_text())
    damage(facts)
    (tmp_path / "plan.json").write_text(json.dumps(facts))
    before = tiny.schedule
    with pytest.raises(PlanError, match=r"plan\.json is (damaged|not a saved plan)"):
        tiny.schedule = Plan.load(tmp_path / "plan.json")
    assert tiny.schedule == before


def test_a_saved_mode_that_a_unit_cannot_have_is_named(middle, tiny):
    with pytest.raises(ScheduleError, match=r"Unknown mode for stem\. Received: 'invert'"):
        tiny.schedule = replace(middle, schedule=("invert", *middle.schedule[1:]))


def test_the_additive_model_stores_or_inverts(profile):
    middle = revzoo.solve(
        profile, (profile.memory.fixed_bytes + revzoo.solve(profile, "8GiB").no_recompute_peak_bytes) * 2 // 3
    )
    plan = revzoo.solve(profile, middle.budget_bytes, "knapsack")
    assert plan.solver == "knapsack"
    assert set(plan.schedule) <= {"store", "invert"}
    assert plan.schedule[0] == plan.schedule[-1] == "store"
    assert plan.peak_bytes <= plan.budget_bytes
    assert plan.extra_flops >= middle.extra_flops


def test_the_additive_model_refers_to_the_exact_one(profile):
    with pytest.raises(BudgetError, match=r"The knapsack .* no schedule within 1000 B\. Try solver='timeline'"):
        revzoo.solve(profile, 1000, "knapsack")
    with pytest.raises(UnknownNameError, match=r"Unknown solver 'timelin'\. Did you mean 'timeline'\?"):
        revzoo.solve(profile, "8GiB", "timelin")


def predict_too_little(profile: Profile, missing: int) -> Profile:
    """Return a profile that predicts `missing` bytes too little for every schedule."""
    return replace(profile, memory=replace(profile.memory, fixed_bytes=profile.memory.fixed_bytes - missing))


@pytest.mark.parametrize("missing", [1, 60_000])
def test_a_plan_that_counts_more_than_predicted_is_made_again_for_less(missing, profile, middle, tiny, x):
    budget = middle.peak_bytes - 1  # the profile that predicts too little believes that this schedule fits
    wrong = predict_too_little(profile, missing)
    first = revzoo.solve(wrong, budget)
    tiny.schedule = first
    assert first.peak_bytes <= budget < revzoo.measure_memory(tiny, x).peak_bytes
    plan = enforce_budget(tiny, x, wrong, first)
    tiny.schedule = plan
    assert revzoo.measure_memory(tiny, x).peak_bytes == plan.peak_bytes <= budget == plan.budget_bytes
    assert cost(profile.problem, plan.schedule) > cost(profile.problem, first.schedule)


def test_a_budget_that_no_counted_step_fits_is_refused(profile, middle, tiny, x):
    wrong, budget = predict_too_little(profile, 5000), middle.min_peak_bytes - 1
    first = revzoo.solve(wrong, budget)
    with pytest.raises(
        BudgetError, match=r"No schedule fits .*: the planned training step has a counted peak of .*Try a larger budget"
    ):
        enforce_budget(tiny, x, wrong, first)


def test_planning_in_one_call_counts_the_planned_step(profile, middle, tiny, x, monkeypatch):
    monkeypatch.setattr(planner, "profile", lambda *args, **kwargs: predict_too_little(profile, 5000))
    budget = middle.peak_bytes - 1
    tiny.schedule = plan = revzoo.plan(tiny, x, budget)
    assert revzoo.measure_memory(tiny, x).peak_bytes == plan.peak_bytes <= budget


def test_a_plan_of_the_additive_model_that_admits_its_excess_is_counted_only(profile, middle, tiny, x):
    plan = revzoo.solve(profile, middle.budget_bytes, "knapsack")
    plan = replace(plan, budget_bytes=plan.peak_bytes - 1)
    assert enforce_budget(tiny, x, profile, plan) == plan


def long_chain(mlp) -> tuple[ReversibleChain, tuple[torch.Tensor, ...]]:
    """Return a chain in which activations weigh more than weights."""
    return ReversibleChain([mlp() for _ in range(12)]), torch.randn(2, 64, 16, 8).unbind()


def test_runs_are_no_longer_than_rounding_allows(mlp):
    profile = revzoo.profile(*long_chain(mlp), run=False)
    lengths, least = {}, {}
    for most in (None, 4, 1, 0):
        limited = replace(profile, memory=replace(profile.memory, max_invert_run=most))
        plan = revzoo.solve(limited, revzoo.solve(limited, "8GiB").min_peak_bytes)
        runs = "".join("i" if mode == "invert" else " " for mode in plan.schedule).split()
        lengths[most], least[most] = max(map(len, runs), default=0), plan.min_peak_bytes
        assert plan.max_invert_run == most
    assert lengths[None] > 4
    assert all(lengths[most] <= most for most in (4, 1, 0))
    assert least[None] < least[4] <= least[1] <= least[0]


def test_profile_solve_and_count_in_one_call(tiny, x):
    optimizer = torch.optim.AdamW(tiny.parameters())
    profile = revzoo.profile(tiny, x, optimizer, run=False)
    ends = revzoo.solve(profile, "8GiB")
    plan = revzoo.plan(tiny, x, (ends.min_peak_bytes + ends.no_recompute_peak_bytes) // 2, optimizer=optimizer)
    tiny.schedule = plan
    assert revzoo.measure_memory(tiny, x, optimizer).peak_bytes == plan.peak_bytes <= plan.budget_bytes
    assert plan.seconds is not None
    assert plan.seconds > 0


def test_a_plan_reads_well(middle):
    first, second, third = str(middle).splitlines()
    assert first == "rev_vit_digits, batch of [8, 1, 8, 8] float32, weights in float32, on cpu"
    assert second.startswith("peak ")
    assert "all stored" in second
    assert "at least" in second
    assert third.endswith("FLOPs more than storing")
