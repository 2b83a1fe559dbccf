"""A lower bound for the cost of any schedule within a budget, to compare measured plans with."""

import math
from collections import Counter
from fractions import Fraction
from itertools import pairwise

from revzoo.planning.solvers.problem import Option, Problem, Unit


def fractional_bound(problem: Problem, budget: int) -> float:
    """Return a lower bound for the cost of every schedule within the budget; infinity where certainly none fits.

    The problem is relaxed: units may mix their modes, and only what they keep counts, which must leave room in front of each
    unit for the smallest need of that unit in any mode. A state that several units may keep counts for each of them in equal
    shares. Starting from the lightest mode of every unit, bytes are spent where they save most, as far as the fullest prefix
    behind the unit allows.

    Source: Dantzig, "Discrete-variable extremum problems", Operations Research 1957, for nested capacities; the greedy choice
        is optimal for those.
    """
    keepers = Counter(state for unit in problem.units for state in {s for option in unit.options for s in option.kept_states})
    room = [Fraction(budget - problem.fixed_bytes - need) for need in [*map(_find_min_need, problem.units), problem.loss_bytes]]
    bound, gains = Fraction(0), []
    for k, unit in enumerate(problem.units):
        choices = [(_weigh(problem, option, keepers), option.cost) for option in _all_options(unit)]
        (weight, price), *others = _convex_hull(choices)
        bound += price
        room[k + 1 :] = [free - weight for free in room[k + 1 :]]
        for (lighter, dear), (heavier, cheap) in pairwise([(weight, price), *others]):
            gains.append(((dear - cheap) / (heavier - lighter), k, heavier - lighter))
    if min(room) < 0:
        return math.inf
    for rate, k, weight in sorted(gains, reverse=True):
        taken = min(weight, *room[k + 1 :])
        room[k + 1 :] = [free - taken for free in room[k + 1 :]]
        bound -= rate * taken
    return float(bound)


def _all_options(unit: Unit) -> list[Option]:
    return [*unit.options, unit.first] if unit.first else [*unit.options]


def _find_min_need(unit: Unit) -> int:
    return min(max(option.forward_bytes, min(option.backward_bytes)) for option in _all_options(unit))


def _weigh(problem: Problem, option: Option, keepers: Counter[int]) -> Fraction:
    return option.kept_bytes + sum(
        (Fraction(problem.sizes[state], keepers[state]) for state in option.kept_states), Fraction(0)
    )


def _convex_hull(choices: list[tuple[Fraction, int]]) -> list[tuple[Fraction, int]]:
    """Return the corners of the lower left convex hull of (weight, cost), from the lightest to the cheapest."""
    corners: list[tuple[Fraction, int]] = []
    for weight, price in sorted(choices):
        if corners and price >= corners[-1][1]:
            continue
        while len(corners) > 1 and _slope(corners[-2], corners[-1]) >= _slope(corners[-2], (weight, price)):
            corners.pop()
        corners.append((weight, price))
    return corners


def _slope(a: tuple[Fraction, int], b: tuple[Fraction, int]) -> Fraction:
    return (b[1] - a[1]) / (b[0] - a[0])
