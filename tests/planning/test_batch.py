"""The best batch size on a device whose times are known."""

from functools import cache

import pytest

import revzoo
from revzoo.errors import BudgetError, InputError
from revzoo.planning import batch as batches
from revzoo.planning.batch import find_best_batch
from revzoo.planning.profiling import profile as profiles
from revzoo.planning.profiling.clock import Median
from revzoo.planning.profiling.count import count
from revzoo.planning.profiling.timing import Timing
from revzoo.planning.solvers.problem import Problem
from revzoo.planning.solvers.schedule_totals import peak

LOW, HIGH = 4, 12


def create(device: str = "cpu") -> revzoo.Model:
    """Return a model of few blocks."""
    return revzoo.create("rev_vit_digits", overrides=["stages.0.depth=2"], device=device)


@cache
def counted(size: int) -> Problem:
    """Return the counted problem of the model for a batch size."""
    model = create()
    return count(model, model.example_input(size))


@pytest.fixture
def known_device(monkeypatch):
    """A device on which every step takes 1 s + 10 ms a sample, and every unit that is not stored 2 ms a sample more."""

    def times(model, batch, problem, allowance, loss=None):
        extra = {"store": 0, **dict.fromkeys(("selective", "recompute", "invert", "first"), 2_000_000 * len(batch))}
        return Timing(1 + 0.01 * len(batch), (0.001 * len(batch),) * len(problem.units), (extra,) * len(problem.units), 0.0, 1)

    def run(model, batch, modes, loss=None, lookahead=0):
        return Median(1 + 0.01 * len(batch) + 0.002 * len(batch) * sum(mode != "store" for mode in modes), 0.02)

    monkeypatch.setattr(profiles, "count", lambda model, batch, *args, **kwargs: counted(len(batch)))
    monkeypatch.setattr(profiles, "measure_inversion_limit", lambda model, batch: None)
    monkeypatch.setattr(profiles, "measure_timing", times)
    monkeypatch.setattr(batches, "measure_step_seconds", run)


def test_the_best_is_the_largest_where_time_does_not_grow_with_it(known_device):
    """Per sample all stored takes 1 / b + 10 ms: the larger the better, as long as nothing is dropped for it."""
    model = create()
    stored = peak(counted(HIGH), ["store"] * len(model.units))
    best = find_best_batch(model, stored, LOW, HIGH)
    assert [row.batch for row in best.rows] == [4, 8, 10, 11, 12]
    assert (best.batch, set(best.plan.schedule), best.plan.peak_bytes) == (HIGH, {"store"}, stored)
    assert best.samples_per_second == pytest.approx(HIGH / 1.12, rel=1e-12)
    assert best.seconds == pytest.approx(best.plan.seconds, rel=1e-12)
    assert f"batch {HIGH} of {LOW} to {HIGH} is best: 10.71 samples a second" in str(best)


def test_within_a_budget_dropping_is_weighed_against_size(known_device):
    model = create()
    stored = peak(counted(8), ["store"] * len(model.units))
    best = find_best_batch(model, stored, LOW, HIGH)
    rates = {row.batch: row.batch / row.planned for row in best.rows}
    assert best.batch == max(rates, key=rates.get)
    for row in best.rows:
        dropped = sum(mode != "store" for mode in row.schedule)
        assert row.planned == pytest.approx(1 + (0.01 + 0.002 * dropped) * row.batch, rel=1e-9)
        assert (row.stored is not None) == (row.batch <= 8) == (dropped == 0)
        assert row.peak_bytes <= stored
    model.schedule = best.plan
    assert revzoo.measure_memory(model, model.example_input(best.batch)).peak_bytes == best.plan.peak_bytes <= stored


def test_the_best_size_inside_the_range_is_the_best_of_all(known_device, monkeypatch):
    """Above 7 samples each one more takes half a second."""

    def seconds(model, batch, modes, loss=None, lookahead=0):
        return Median(1 + 0.01 * len(batch) + max(0, len(batch) - 7) / 2, 0.0)

    monkeypatch.setattr(batches, "measure_step_seconds", seconds)
    best = find_best_batch(create(), "1GiB", LOW, HIGH)
    assert (best.batch, best.seconds) == (7, pytest.approx(1.07))


def test_a_size_that_the_device_cannot_run_is_passed_over(known_device, monkeypatch):
    def full(model, batch, modes, loss=None, lookahead=0):
        if len(batch) > 8:
            raise MemoryError
        return Median(1 + 0.01 * len(batch), 0.02)

    monkeypatch.setattr(batches, "measure_step_seconds", full)
    assert find_best_batch(create(), "1GiB", LOW, HIGH).batch == 8
    with pytest.raises(BudgetError, match="A batch of 9 cannot be run"):
        find_best_batch(create(), "1GiB", 9, HIGH)


def test_sizes_that_are_none_are_refused(known_device):
    model = create()
    with pytest.raises(InputError, match="Received: 5 to 2"):
        find_best_batch(model, "1GiB", 5, 2)
    with pytest.raises(BudgetError, match=r"No schedule fits 100.0 KiB: at least"):
        find_best_batch(model, "100KiB", LOW, HIGH)
    with pytest.raises(InputError, match="on the meta device"):
        find_best_batch(create("meta"), "1GiB", LOW, HIGH)
