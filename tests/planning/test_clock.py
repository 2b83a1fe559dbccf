"""Samples of a clock: their median, how sure it is, how many are taken, and the rising numbers nearest to some medians."""

import itertools

import pytest

from revzoo.planning.profiling import clock
from revzoo.planning.profiling.clock import Median, combine_spreads, find_median, repeat, smooth_rising


@pytest.fixture(autouse=True)
def most_rounds() -> None:
    """Make as many rounds as outside of tests."""


def test_the_spread_is_the_standard_error_of_the_median():
    assert find_median([2.0] * 5) == (2.0, 0.0)
    assert find_median([2.0, 2.0, 2.0, 90.0]) == (2.0, 0.0)  # a bad step is not felt
    seconds, spread = find_median([8.0, 9.0, 10.0, 11.0, 12.0, 9.0, 11.0, 10.0, 500.0])
    assert seconds == 10.0
    assert spread == pytest.approx(1.4826 * 1.2533 * 0.1 / 3)
    assert find_median([0.0, 0.0]) == (0.0, 0.0)


def test_what_takes_longer_counts_more():
    assert combine_spreads([Median(3.0, 0.01), Median(1.0, 0.05)]) == pytest.approx(0.02)
    assert combine_spreads([]) == combine_spreads([Median(0.0, 0.0)]) == 0.0


@pytest.mark.parametrize(
    ("medians", "expected"),
    [
        ([], []),
        ([(1.0, 4), (2.0, 4), (2.0, 4)], [1.0, 2.0, 2.0]),
        ([(1.0, 4), (4.0, 1), (2.0, 3)], [1.0, 2.5, 2.5]),
        ([(5.0, 2), (1.0, 2), (3.0, 2), (2.0, 2)], [2.75, 2.75, 2.75, 2.75]),
    ],
)
def test_falling_neighbours_are_averaged(medians, expected):
    assert smooth_rising(medians) == expected


def test_rounds_end_when_the_spread_is_low_or_after_so_many():
    assert list(repeat(4, lambda: 0.03)) == list(range(4))
    assert list(repeat(4, lambda: 0.031)) == list(range(16))
    spreads = iter([0.5, 0.2, 0.02])
    assert list(repeat(4, lambda: next(spreads))) == list(range(6))


def test_there_is_one_round_however_long_it_takes(monkeypatch):
    now = itertools.count(step=121)
    monkeypatch.setattr(clock.time, "perf_counter", lambda: next(now))
    assert list(repeat(4, lambda: 1.0)) == [0]
