"""The benchmark's lower bound on costs: by hand, and never above the cost of the best schedule."""

import math
import random
import sys
from pathlib import Path

import pytest

from revzoo.planning.solvers.problem import Option, Problem, Unit, cost
from revzoo.planning.solvers.timeline import minimize_peak, solve_timeline


@pytest.fixture
def benchmarks(monkeypatch) -> None:
    """Let the files of the benchmarks be imported as they import each other."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith("planning_"):
            del sys.modules[name]


def step(k: int) -> Unit:
    """Return a step that stores 100 bytes and its input of 10 bytes, or inverts at a cost of 7."""
    store = Option("store", 100, (k,), 110, (120, 110), 0)
    invert = Option("invert", 0, (), 10, (140,) * 2, 7)
    return Unit(f"step{k}", (k - 1, k) if k else (0,), (k,), (store, invert), invert)


def test_the_bound_of_three_steps_by_hand(benchmarks):
    """Stored steps weigh 110; in front of the loss 1280 - 1010 = 270 fit, 170 of them on steps 0 and 1."""
    from planning_bound import fractional_bound

    three = Problem(tuple(map(step, range(3))), dict.fromkeys(range(4), 10), 1000, 10, (2, 3))
    assert fractional_bound(three, 1280) == pytest.approx(21 - 7 * 270 / 110, rel=1e-15)
    assert fractional_bound(three, 1350) == 0
    assert fractional_bound(three, 1109) == math.inf


def test_no_schedule_costs_less_than_the_bound(benchmarks):
    from planning_bound import fractional_bound
    from planning_chain import arbitrary

    rng, above_zero = random.Random(0), 0
    for i in range(150):
        problem = arbitrary(rng, 2 + i % 9, 300)
        smallest, _ = minimize_peak(problem)
        for budget in (smallest, smallest + rng.randint(0, 60)):
            bound = fractional_bound(problem, budget)
            assert bound <= cost(problem, solve_timeline(problem, budget))
            above_zero += bound > 0
    assert above_zero > 75
