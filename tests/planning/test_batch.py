"""The best batch size: interpolated numbers against counted ones, and the choice on a device whose times are known."""

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
from revzoo.planning.solvers.schedule import peak

LOW, HIGH = 4, 12
SHORT = {"rev_vit_digits": ["stages.0.depth=2"], "revnet_digits": [f"stages.{i}.depth=1" for i in range(3)]}


def create(name: str, device: str = "cpu") -> revzoo.Model:
    """Return a model of few blocks."""
    return revzoo.create(name, overrides=SHORT[name], device=device)


@cache
def counted(name: str, size: int) -> Problem:
    """Return the counted problem of a model for a batch size."""
    model = create(name)
    return count(model, model.example_input(size))


@pytest.fixture
def known_device(monkeypatch):
    """A device on which every step takes 1 s + 10 ms a sample, and every unit that is not stored 2 ms a sample more."""

    def times(model, batch, problem, allowance, loss=None):
        extra = {"store": 0, **dict.fromkeys(("selective", "recompute", "invert", "first"), 2_000_000 * len(batch))}
        return Timing(1 + 0.01 * len(batch), (0.001 * len(batch),) * len(problem.units), (extra,) * len(problem.units), 0.0, 1)

    def run(model, batch, schedules, loss=None):
        ((modes, _),) = schedules
        return [Median(1 + 0.01 * len(batch) + 0.002 * len(batch) * sum(mode != "store" for mode in modes), 0.02)]

    def counted_once(model, batch, loss=None, other_bytes=0, update_bytes=0, lookahead=False):
        return counted(model.spec.name, len(batch))

    monkeypatch.setattr(profiles, "count", counted_once)
    monkeypatch.setattr(batches, "count", counted_once)
    monkeypatch.setattr(profiles, "measure_inversion_limit", lambda model, batch: None)
    monkeypatch.setattr(profiles, "measure_timing", times)
    monkeypatch.setattr(batches, "measure_timing", times)
    monkeypatch.setattr(batches, "measure_step_seconds", run)
    monkeypatch.setattr(batches, "_CANDIDATES", 5)


@pytest.mark.parametrize("name", ["rev_vit_digits", "revnet_digits"])
def test_a_third_batch_size_is_never_predicted_too_small(name, known_device):
    """Sizes and FLOPs lie on the line; a peak, the larger of several lines, lies under the chord through two of its points."""
    model = create(name)
    predicted, third = batches._Interpolation(model, LOW, HIGH, None, 0, 2**40).at(7).memory, counted(name, 7)
    assert (predicted.fixed_bytes, predicted.sizes, predicted.loss_bytes) == (
        third.fixed_bytes,
        third.sizes,
        third.loss_bytes,
    )
    for unit, counted_unit in zip(predicted.units, third.units, strict=True):
        for a, b in zip(unit.options, counted_unit.options, strict=True):
            assert (a.mode, a.kept_states, a.kept_bytes, a.cost, a.made_bytes) == (
                b.mode,
                b.kept_states,
                b.kept_bytes,
                b.cost,
                b.made_bytes,
            )
            pairs = zip((a.forward_bytes, *a.backward_bytes), (b.forward_bytes, *b.backward_bytes), strict=True)
            assert all(true <= bytes_ <= 1.1 * true for bytes_, true in pairs)


@pytest.mark.parametrize(
    ("low", "high", "at", "bytes_"),
    [(0, 16, 7, 6), (0, 10, 7, 4), (10, 0, 7, 7), (5, 5, 9, 5), (10**15, 10**15 + 1, 5, 10**15 + 1), (0, 10, 14, 13)],
)
def test_bytes_between_two_batch_sizes_are_rounded_up(low, high, at, bytes_):
    """By hand, on the line through sizes 4 and 12: rounded down, a plan could exceed its budget by the fraction of a byte."""
    assert batches._Line(4, 12, at).bytes(low, high) == bytes_


def test_times_are_interpolated(known_device):
    interpolation = batches._Interpolation(create("rev_vit_digits"), LOW, HIGH, None, 0, 2**40)
    times = interpolation.at(10).timing
    assert times.step_seconds == pytest.approx(1.1, rel=1e-12)
    assert {ns for extra in times.extra for ns in extra.values()} == {0, 20_000_000}
    assert interpolation.at(10).setting.batch == ("[10, 1, 8, 8] float32",)


def test_the_best_is_the_largest_where_time_does_not_grow_with_it(known_device):
    """Per sample all stored takes 1 / b + 10 ms: the larger the better, as long as nothing is dropped for it."""
    model = create("rev_vit_digits")
    stored = peak(counted("rev_vit_digits", HIGH), ["store"] * len(model.units))
    best = find_best_batch(model, stored, LOW, HIGH)
    assert [row.batch for row in best.rows] == list(range(LOW, HIGH + 1, 2))
    assert (best.batch, set(best.plan.schedule), best.plan.peak_bytes) == (HIGH, {"store"}, stored)
    assert best.samples_per_second == pytest.approx(HIGH / 1.12, rel=1e-12)
    assert best.seconds == pytest.approx(best.predicted_seconds, rel=1e-12)
    assert f"batch {HIGH} of {LOW} to {HIGH} is best: 10.71 samples a second" in str(best)


def test_within_a_budget_dropping_is_weighed_against_size(known_device):
    model = create("rev_vit_digits")
    stored = peak(counted("rev_vit_digits", 8), ["store"] * len(model.units))
    best = find_best_batch(model, stored, LOW, HIGH)
    assert best.plan.peak_bytes <= stored
    rates = {row.batch: row.batch / row.planned for row in best.rows}
    assert best.batch == max(rates, key=rates.get)
    for row in best.rows:
        dropped = sum(mode != "store" for mode in row.schedule)
        assert row.planned == pytest.approx(1 + (0.01 + 0.002 * dropped) * row.batch, rel=1e-9)
        assert (row.stored is not None) == (row.batch <= 8) == (dropped == 0)
        assert row.peak_bytes <= stored
    model.schedule = best.plan
    assert revzoo.measure_memory(model, model.example_input(best.batch)).peak_bytes == best.plan.peak_bytes


def test_times_off_the_line_are_measured_before_a_size_is_recommended(known_device, monkeypatch):
    """Above 8 samples a step takes a second more, which the line through sizes 2 and 8 does not show."""
    measured = []

    def seconds(size):
        return 1 + 0.01 * size + (size > 8)

    def times(model, batch, problem, allowance, loss=None):
        measured.append(len(batch))
        extra = dict.fromkeys(("store", "selective", "recompute", "invert", "first"), 0)
        return Timing(seconds(len(batch)), (0.0,) * len(problem.units), (extra,) * len(problem.units), 0.0, 1)

    monkeypatch.setattr(profiles, "measure_timing", times)
    monkeypatch.setattr(batches, "measure_timing", times)
    monkeypatch.setattr(batches, "measure_step_seconds", lambda model, batch, schedules, loss: [Median(seconds(len(batch)), 0)])
    monkeypatch.setattr(batches, "_CANDIDATES", 11)
    best = find_best_batch(create("rev_vit_digits"), "1GiB", 2, 12)
    assert measured == [2, 8, 12]
    assert (best.batch, best.seconds, best.predicted_seconds) == (8, 1.08, 1.08)
    predicted = {row.batch: row.planned for row in best.rows}
    assert predicted == {size: pytest.approx(1 + 0.01 * size + max(0, size - 8) / 4) for size in range(2, 13)}


def test_a_size_that_the_device_cannot_run_is_passed_over(known_device, monkeypatch):
    def full(model, batch, schedules, loss=None):
        if len(batch) > 8:
            raise MemoryError
        return [Median(1 + 0.01 * len(batch), 0.02)]

    monkeypatch.setattr(batches, "measure_step_seconds", full)
    assert find_best_batch(create("rev_vit_digits"), "1GiB", LOW, HIGH).batch == 8


def test_sizes_that_are_none_are_refused(known_device):
    model = create("rev_vit_digits")
    with pytest.raises(InputError, match="Received: 5 to 2"):
        find_best_batch(model, "1GiB", 5, 2)
    with pytest.raises(BudgetError, match="No schedule fits 100.0 KiB: at least"):
        find_best_batch(model, "100KiB", LOW, HIGH)
    with pytest.raises(InputError, match="on the meta device"):
        find_best_batch(create("rev_vit_digits", "meta"), "1GiB", LOW, HIGH)
