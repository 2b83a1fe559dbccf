"""Seconds of every unit in every mode: what is run, what is made of it, and that the model is left unchanged."""

import itertools
from collections import Counter

import pytest
import torch
from torch import nn

import revzoo
from revzoo.planning.profiling import timing
from revzoo.planning.profiling.count import count
from revzoo.planning.profiling.timing import list_variants, measure_timing
from revzoo.planning.solvers.problem import Problem
from revzoo.planning.solvers.schedule_totals import peak
from revzoo.runtime import ReversibleChain

PLENTY = 2**40
MODES = {"store", "selective", "recompute", "invert", "first"}


@pytest.fixture(autouse=True)
def most_rounds() -> None:
    """Make as many rounds as outside of tests."""


@pytest.fixture
def timetable(monkeypatch):
    """Let every unit take its share of a known time; return the schedules that were run."""
    seconds = {"store": 3.0, "selective": 3.25, "recompute": 3.5, "invert": 4.0, "first": 3.75}
    seen: list[list[str]] = []

    def known(model, batch, modes, loss, lookahead=0):
        seen.append(list(modes))
        noise = 100.0 if len(seen) == 2 else 0.0  # one bad step, which a median does not feel
        spent = [seconds[variant] - 1 + noise for variant in list_variants(modes)]
        return sum(spent) + len(modes) + 0.5, [1.0] * len(modes), spent

    monkeypatch.setattr(timing, "_time_step", known)
    return seen


def chain_of(depth: int, rows: int = 3) -> tuple[ReversibleChain, tuple[torch.Tensor, ...]]:
    chain = ReversibleChain([nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(depth)])
    return chain, torch.randn(2, rows, 8).unbind()


def test_medians_over_all_units_of_a_kind(timetable):
    chain, batch = chain_of(8)
    times = measure_timing(chain, batch, count(chain, batch), PLENTY)
    known = {"store": 0, "selective": 250_000_000, "recompute": 500_000_000, "invert": 10**9, "first": 750_000_000}
    assert times.extra[1:] == (known,) * 7
    assert times.extra[0] == known | {"invert": known["first"]}  # it always begins a run, and is a kind of its own
    assert times.forward_seconds == (1.0,) * 8
    assert times.step_seconds == 8 * 3.0 + 0.5
    assert times.spread == 0.0
    assert times.runs == len(timetable) - 1 == 16  # the first is run twice, once to warm up


def test_every_unit_has_every_mode_in_every_round(timetable, tiny):
    x = tiny.example_input(2)
    measure_timing(tiny, x, count(tiny, x), PLENTY)
    for round_ in range(4):
        columns = list(zip(*timetable[1 + 4 * round_ : 5 + 4 * round_], strict=True))
        assert [len(set(column)) for column in columns] == [3, 4, 4, 4, 4, 3, 3]
    assert len(set(map(tuple, timetable))) > 12


def test_of_many_units_of_a_kind_a_few_are_stored_where_all_would_not_fit(timetable):
    chain, batch = chain_of(20, rows=300)
    problem = count(chain, batch)
    allowance = peak(problem, ["store"] * 7 + ["invert"] * 13)
    times = measure_timing(chain, batch, problem, allowance)
    assert {len(extra) for extra in times.extra} == {5}
    assert all(peak(problem, modes) <= allowance for modes in timetable)
    # The first and the last step each do work of their own; four of the others have every mode.
    assert min(Counter(modes)["invert"] for modes in timetable) >= 20 - (1 + 1 + 4)
    assert peak(problem, [*["store", "selective", "recompute", "invert"] * 5]) > allowance


def test_nothing_is_run_where_nothing_fits(timetable):
    chain, batch = chain_of(8)
    with pytest.raises(MemoryError, match="no training step with a few stored units fits"):
        measure_timing(chain, batch, count(chain, batch), 1000)
    assert not timetable


def test_where_one_unit_of_each_kind_is_too_much_kinds_take_turns(timetable):
    chain, batch = chain_of(20, rows=300)
    problem = count(chain, batch)
    together = peak(problem, ["store", "store", *["invert"] * 17, "store"])
    times = measure_timing(chain, batch, problem, together - 1)
    assert {len(extra) for extra in times.extra} == {5}
    assert max(peak(problem, modes) for modes in timetable) < together
    assert {Counter(modes)["invert"] for modes in timetable} == {18, 19, 20}  # of three kinds one or two


def set_seconds(monkeypatch, seconds):
    """Let every unit take known seconds, given its variant and the number of the step."""
    steps = itertools.count()

    def known(model, batch, modes, loss, lookahead=0):
        step = next(steps)
        spent = [seconds(variant, step) - 1 for variant in list_variants(modes)]
        return sum(spent) + len(modes) + 0.5, [1.0] * len(modes), spent

    monkeypatch.setattr(timing, "_time_step", known)


def test_no_mode_takes_less_than_one_that_runs_less_again(monkeypatch):
    seconds = {"store": 3.0, "selective": 5.0, "recompute": 4.0, "invert": 4.25, "first": 6.0}
    set_seconds(monkeypatch, lambda variant, step: seconds[variant])
    chain, batch = chain_of(8)
    extra = measure_timing(chain, batch, count(chain, batch), PLENTY).extra[1]
    assert list(extra.values()) == sorted(extra.values())
    assert extra["store"] == 0
    assert 10**9 < extra["selective"] == extra["recompute"] < 2 * 10**9
    assert extra["first"] == extra["invert"]
    # Every mode has been run as often, and a quarter of the inverted steps or more begin a run: the mean of all is kept.
    assert 1.25 * 10**9 < extra["invert"] < 3 * 10**9


@pytest.mark.parametrize(("noise", "runs"), [(0.0, 16), (0.25, 16), (8.0, 64)])
def test_more_rounds_where_samples_are_spread(noise, runs, monkeypatch):
    set_seconds(monkeypatch, lambda variant, step: 3.0 + noise * (step % 3))
    chain, batch = chain_of(8)
    times = measure_timing(chain, batch, count(chain, batch), PLENTY)
    assert times.runs == runs
    assert (times.spread == 0.0) == (noise == 0.0)
    assert (times.spread <= 0.03) == (noise < 1)


def test_the_clock_is_that_of_the_thread_except_where_a_second_one_works(monkeypatch):
    ticks = itertools.count()
    monkeypatch.setattr("revzoo.planning.profiling.clock.time.thread_time", lambda: next(ticks))
    chain, batch = chain_of(2)
    # Marks at the beginning, two forwards, the loss, two backwards and the end.
    assert timing.measure_step_seconds(chain, batch, ("invert", "store")) == (6.0, 0.0)
    assert next(ticks) == 6 * 7
    assert timing.measure_step_seconds(chain, batch, ("invert", "invert"), lookahead=1).seconds < 6
    assert next(ticks) == 6 * 7 + 1


def test_steps_that_are_run_give_times_of_every_unit(tiny):
    x = tiny.example_input(2)
    times = measure_timing(tiny, x, count(tiny, x), PLENTY)
    assert times.runs in range(16, 65, 4)
    assert len(times.extra) == len(times.forward_seconds) == 7
    assert [set(extra) for extra in times.extra[1:5]] == [MODES] * 4
    assert {"store", "selective", "recompute"} == set(times.extra[0]) == set(times.extra[5])
    assert all(extra["store"] == 0 <= min(extra.values()) for extra in times.extra)
    assert all(seconds > 0 for seconds in times.forward_seconds)
    assert times.step_seconds > sum(times.forward_seconds)


def short_revnet() -> revzoo.Model:
    return revzoo.create("revnet_digits", overrides=["stages.0.depth=1", "stages.1.depth=1", "stages.2.depth=1"])


@pytest.fixture(scope="module")
def counted_revnet() -> Problem:
    model = short_revnet()
    return count(model, model.example_input(3))


@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_left_unchanged(fails, counted_revnet, monkeypatch):
    monkeypatch.setattr(timing, "_ROUNDS", 1)
    model = short_revnet()
    x = model.example_input(3)
    model(x).sum().backward()
    model.schedule = schedule = ["recompute", "store", *["invert", "selective"], "store", *["store"] * 7]
    state = {key: (t, t._version, t.clone()) for key, t in model.state_dict(keep_vars=True).items()}
    grads = [(p.grad, p.grad.clone()) for p in model.parameters()]
    problem, random = counted_revnet, torch.get_rng_state()

    def loss(logits: torch.Tensor) -> torch.Tensor:
        if fails and len(calls) == 3:
            raise ValueError("broken")
        calls.append(1)
        return logits.square().sum()

    calls: list[int] = []
    if fails:
        with pytest.raises(ValueError, match="broken"):
            measure_timing(model, x, problem, PLENTY, loss)
    else:
        assert measure_timing(model, x, problem, PLENTY, loss).runs == len(calls) - 1
    assert model.schedule == schedule
    for key, t in model.state_dict(keep_vars=True).items():
        assert (t is state[key][0], t._version) == (True, state[key][1])
        assert torch.equal(t, state[key][2])
    assert all(p.grad is grad and torch.equal(grad, value) for p, (grad, value) in zip(model.parameters(), grads, strict=True))
    assert torch.equal(torch.get_rng_state(), random)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
