"""The additive knapsack against every subset, and its schedules against their true peak."""

from itertools import product

from revzoo.planning.solvers.knapsack import solve_knapsack
from revzoo.planning.solvers.problem import Option, Problem, Unit
from revzoo.planning.solvers.schedule_totals import cost, peak
from revzoo.planning.solvers.timeline import solve_timeline
from revzoo.runtime.mode import Mode


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
