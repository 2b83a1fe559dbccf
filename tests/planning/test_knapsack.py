"""The additive knapsack against tables and every subset, and its schedules against their true peak."""

import random
from itertools import product

import numpy as np
import pytest

from revzoo.planning.solvers.knapsack import Solution, choose_subset, solve_knapsack
from revzoo.planning.solvers.problem import Option, Problem, Unit
from revzoo.planning.solvers.schedule import cost, peak
from revzoo.planning.solvers.timeline import solve_timeline
from revzoo.runtime.mode import Mode


def table(values, weights, capacity) -> int:
    """Return the best value by the textbook table over the capacity."""
    best = np.zeros(capacity + 1, np.int64)
    for value, weight in zip(values, weights, strict=True):
        if weight <= capacity:
            best[weight:] = np.maximum(best[weight:], best[: capacity + 1 - weight] + value)
    return int(best[capacity])


def check(solution: Solution, values, weights, capacity) -> None:
    assert list(solution.chosen) == sorted(set(solution.chosen))
    assert solution.value == sum(values[i] for i in solution.chosen)
    assert solution.weight == sum(weights[i] for i in solution.chosen) <= capacity


@pytest.mark.parametrize(
    ("values", "weights", "capacity", "expected"),
    [
        ([60, 100, 120], [10, 20, 30], 50, Solution((1, 2), 220, 50, 0.0)),
        ([7, 7, 7], [5, 5, 5], 10, Solution((0, 1), 14, 10, 0.0)),
        ([3, 0, -1, 2], [4, 0, 0, 0], 3, Solution((3,), 2, 0, 0.0)),
        ([5], [6], 5, Solution((), 0, 0, 0.0)),
        ([], [], 0, Solution((), 0, 0, 0.0)),
        # Upper bounds are floats: 49 * (1 / 49) is below 1, and rounded down it would call the first item alone the optimum.
        ([5, 4, 2], [245, 196, 98], 294, Solution((1, 2), 6, 294, 0.0)),
    ],
)
def test_by_hand(values, weights, capacity, expected):
    assert choose_subset(values, weights, capacity) == expected


@pytest.mark.parametrize(("weights", "capacity"), [([1, -1], 5), ([1, 1], -1)])
def test_negative_bytes_are_refused(weights, capacity):
    with pytest.raises(ValueError, match="must be at least 0"):
        choose_subset([1, 1], weights, capacity)


@pytest.mark.parametrize("likeness", ["none", "constant", "equal", "kinds"])
def test_equals_the_table_on_small_problems(likeness):
    rng = random.Random(likeness)
    for _ in range(100):
        count = rng.randint(1, 14)
        weights = [rng.choice([7, 12, 30]) if likeness == "kinds" else rng.randint(0, 40) for _ in range(count)]
        values = [
            {"none": rng.randint(-2, 40), "constant": weight + 5, "equal": weight, "kinds": 3 * weight + weight % 5}[likeness]
            for weight in weights
        ]
        capacity = rng.randint(0, sum(weights) + 5)
        solution = choose_subset(values, weights, capacity)
        check(solution, values, weights, capacity)
        assert (solution.value, solution.gap) == (table(values, weights, capacity), 0.0)


@pytest.mark.parametrize("vary", ["nothing", "time", "bytes and time"])
def test_exact_on_what_a_network_has(vary):
    """200 items of 2 to 6 kinds, 1e8 to 4e9 bytes each. Scaled down to units of 1e6 bytes a table says the same."""
    for seed in range(3):
        rng = random.Random(seed)
        kinds = [(rng.randint(100, 4000), rng.randint(8, 34)) for _ in range(rng.randint(2, 6))]
        weights, values = [], []
        for i in range(200):
            size, flops = kinds[i % len(kinds)]
            weights.append(round(size * (1 + 0.02 * rng.random() * (vary == "bytes and time"))))
            values.append(round(1000 * size * flops * (1 + 0.02 * rng.random() * (vary != "nothing"))))
        expected = table(values, weights, 100_000)
        weights = [weight * 10**6 for weight in weights]
        solution = choose_subset(values, weights, 10**11)
        check(solution, values, weights, 10**11)
        assert (solution.value, solution.gap) == (expected, 0.0)


@pytest.mark.parametrize("likeness", ["constant", "equal"])
def test_the_gap_covers_what_thinning_loses(likeness):
    thinned = 0
    for seed in range(30):
        rng = random.Random(seed)
        weights = [rng.randint(50, 400) for _ in range(30)]
        values = [weight + 50 * (likeness == "constant") for weight in weights]
        capacity = sum(weights) // 2
        optimum = table(values, weights, capacity)
        for most in (1, 3, 10, 30):
            solution = choose_subset(values, weights, capacity, max_partials=most)
            check(solution, values, weights, capacity)
            assert optimum - solution.value <= solution.gap * optimum + 1e-9
            thinned += solution.gap > 0
    assert thinned > 10


@pytest.mark.parametrize("constant", [0, 10**8])
def test_adversaries_stay_within_the_capacity_and_the_gap(constant):
    """Strongly correlated values and sums of subsets, n = 200, with few states to be quick."""
    rng = random.Random(0)
    weights = [rng.randint(10**7, 10**9) for _ in range(200)]
    values = [weight + constant for weight in weights]
    capacity = sum(weights) // 2
    solution = choose_subset(values, weights, capacity, max_partials=2000)
    check(solution, values, weights, capacity)
    assert 0 < solution.gap < 1e-2
    better = choose_subset(values, weights, capacity, max_partials=10_000)
    check(better, values, weights, capacity)
    assert better.value * (1 - solution.gap) <= solution.value + 1


def chain(count: int) -> Problem:
    """A node and then steps that keep 100 bytes, or 10 + 10k of work to invert; states of 10 bytes."""
    units = [Unit("stem", (0,), (0,), (Option(Mode.STORE, 50, (0,), 60, (70, 60), 0),), None)]
    for k in range(1, count + 1):
        store = Option(Mode.STORE, 90, (k,), 100, (120, 110), 0)
        first, inside = (Option(Mode.INVERT, 0, (), 10, (140, 140), 10 + 10 * k + more) for more in (0, 1))
        units.append(Unit(f"step{k}", (k - 1, k), (k,), (store, inside), first))
    return Problem(tuple(units), dict.fromkeys(range(count + 2), 10), 1000, 10, (count, count + 1))


def test_the_additive_model_by_hand():
    """All inverted: 1000 + stem 60, then 140 in backward; it keeps 60 and the pair of 20. A stored step adds 100."""
    problem = chain(3)
    assert peak(problem, ["store", "invert", "invert", "invert"]) == 1200
    assert solve_knapsack(problem, 1199) is None
    assert solve_knapsack(problem, 1299) == ["store", "invert", "invert", "invert"]
    assert solve_knapsack(problem, 1300) == ["store", "invert", "invert", "store"]
    assert solve_knapsack(problem, 1079, "static") is None
    assert solve_knapsack(problem, 1180, "static") == ["store", "invert", "invert", "store"]
    assert solve_knapsack(problem, 1500) == ["store"] * 4


def test_read_as_peak_it_is_slower_and_read_as_static_too_large():
    """Three stored steps need 1060 + 300 + 10 of the pair of the run (one is given), 10 for the last state, 10 for the loss."""
    problem, budget = chain(6), 1380
    exact, additive, static = (
        solve_timeline(problem, budget),
        solve_knapsack(problem, budget),
        solve_knapsack(problem, budget, "static"),
    )
    assert (peak(problem, exact), cost(problem, exact)) == (1290, 143)
    assert (peak(problem, additive), cost(problem, additive)) == (1200, 204)
    assert (peak(problem, static), cost(problem, static)) == (1390, 92)


def test_no_subset_of_stored_steps_saves_more():
    problem = chain(5)
    saved = [20, 31, 41, 51, 61]
    for budget in range(1200, 1750, 50):
        modes = solve_knapsack(problem, budget)
        chosen = sum(time for time, mode in zip(saved, modes[1:], strict=True) if mode == "store")
        assert chosen == max(
            sum(time for time, bit in zip(saved, bits, strict=True) if bit)
            for bits in product((0, 1), repeat=5)
            if 100 * sum(bits) <= budget - 1200
        )
