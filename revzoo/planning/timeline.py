"""The cheapest schedule whose peak fits a budget, exactly.

What a unit keeps is freed before the units in front of it run backward: it weighs on the units behind it only, and the
last ones keep almost for free. Choosing the modes is a multiple-choice knapsack with a capacity for every prefix, weakly
NP-hard; the additive knapsack of `knapsack.py` is the case in which only the whole sum counts.

The search goes from the last unit to the first. For every place (inverted steps so far, states held) in front of a unit
it finds the ways on from there that are worth a look: pairs (bytes, cost), where bytes is the peak that the rest would
have if nothing were kept in front of it. A move with need d that keeps m makes (max(d, m + b), c + its cost) of a pair
(b, c). This grows with b and with c, so a pair that is beaten in both never comes back (Nemhauser & Ullmann 1969), and
what remains in front of the first unit are the whole schedules, none of equal cost with a lower peak. Before that, a walk
forward finds the places and the fewest bytes with which a schedule arrives there; a pair that breaks the budget even with
those is dropped.

Known inefficiencies: the number of pairs in front of a unit is exponential at worst. For 100 steps of two kinds it
reached some thousands, for 100 different ones some ten thousands, because many ways share their largest need. Places
are kept apart by the states held even where one is never better than another, and by the length of the run if that is
limited. All pairs stay in memory (32 bytes each) to find the way back. Every budget is a new search.

Source: Nemhauser and Ullmann, "Discrete dynamic programming and capital allocation", Management Science 1969, with a
maximum in the place of a sum; the bound is the relaxation of Dantzig, "Discrete-variable extremum problems",
Operations Research 1957, for nested capacities.
"""

import math
from collections import Counter
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from revzoo.planning.problem import Moment, Move, Option, Problem, Unit, cost, end_bytes, moves, peak, timeline_of

__all__ = [
    "Moment",
    "Option",
    "Problem",
    "Unit",
    "cost",
    "fractional_bound",
    "least_peak",
    "peak",
    "solve",
    "timeline_of",
]

Place = tuple[int, frozenset[int]]  # (inverted steps up to here, states held that still matter), in front of one unit
_Ways = NDArray[np.int64]  # rows below; by rising bytes and falling cost
_BYTES, _COST, _EXIT, _WAY = range(4)  # a way on takes one exit of its stop, then one of the ways on from there
_ANY = 1 << 62  # a budget or cost above all


@dataclass
class _Stop:
    """A place that schedules come through: fewest bytes alive on arrival, and the moves from there with where they lead."""

    least_bytes: int
    exits: list[tuple[Move, Place]] = field(default_factory=list)


def solve(problem: Problem, budget: int) -> list[str] | None:
    """Return the cheapest schedule that needs at most `budget` bytes; of equal costs one with the lowest peak.

    Returns: one mode per unit, or None where nothing fits: see `least_peak`.
    """
    budget = min(budget, _ANY)
    stops = _stops(problem, budget)
    ways = [{place: _last(end_bytes(problem, place[1]), budget - stop.least_bytes) for place, stop in stops[-1].items()}]
    for here in reversed(stops[:-1]):
        ways.append({place: _merge(stop, ways[-1], budget) for place, stop in here.items()})
    (place,) = stops[0]
    if not ways[-1][place].size:
        return None
    modes, way = [], -1
    for here in stops[:-1]:
        taken = ways.pop()[place][:, way]
        move, place = here[place].exits[taken[_EXIT]]
        modes.append(move.mode)
        way = taken[_WAY]
    return modes


def least_peak(problem: Problem) -> tuple[int, list[str]]:
    """Return the smallest peak that a schedule can have, and the cheapest schedule that has it.

    Raises: ValueError: no schedule is allowed, whatever the budget.
    """
    stops = _stops(problem, _ANY)
    rest = {place: end_bytes(problem, place[1]) for place in stops[-1]}
    for here in reversed(stops[:-1]):
        rest = {
            place: min((max(move.need_bytes, move.kept_bytes + rest[to]) for move, to in stop.exits), default=_ANY)
            for place, stop in here.items()
        }
    least = problem.fixed_bytes + min(rest.values())
    modes = solve(problem, least)
    if modes is None:
        raise ValueError("Every schedule has a unit without a mode that it could take there.")
    return least, modes


def fractional_bound(problem: Problem, budget: int) -> float:
    """Return a cost that no schedule within the budget can go below; infinity where it is sure that none fits.

    Units may mix their modes, and only what they keep counts: before each unit it must leave room for the least that
    the unit needs in any mode. A state that several units may keep counts for each of them in equal shares. From the
    lightest mode of every unit, bytes go where they save most, as far as the fullest prefix behind them allows.

    Source: Dantzig's bound; greedy choice is optimal since the capacities are nested.
    """
    keepers = Counter(state for unit in problem.units for state in {s for option in unit.options for s in option.holds})
    room = [Fraction(budget - problem.fixed_bytes - least) for least in [*map(_least_need, problem.units), problem.loss_bytes]]
    bound, gains = Fraction(0), []
    for k, unit in enumerate(problem.units):
        choices = [(_share(problem, option, keepers), option.cost) for option in _options(unit)]
        (weight, price), *others = _hull(choices)
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


def _stops(problem: Problem, budget: int) -> list[dict[Place, _Stop]]:
    """Return the places in front of each unit, and behind the last, that a schedule within the budget can come through."""
    longest = problem.max_invert_run
    matter = [frozenset(problem.pair_after)]
    for unit in reversed(problem.units):
        matter.append(matter[-1].union(unit.pair, unit.inputs, *(option.holds for option in unit.options)))
    matter.pop()
    stops = [{(0, frozenset[int]()): _Stop(problem.fixed_bytes)}]
    for k in range(len(problem.units)):
        behind: dict[Place, _Stop] = {}
        mattering = matter.pop()
        for place, stop in stops[-1].items():
            for move in moves(problem, k, *place):
                if stop.least_bytes + move.need_bytes > budget or (longest is not None and move.run > longest):
                    continue
                run = min(move.run, 1) if longest is None else move.run  # how long a run is matters only to a limit
                to = (run, move.held & mattering)
                stop.exits.append((move, to))
                kept = stop.least_bytes + move.kept_bytes
                other = behind.setdefault(to, _Stop(kept))
                other.least_bytes = min(other.least_bytes, kept)
        stops.append(behind)
    return stops


def _last(need: int, room: int) -> _Ways:
    """Return the ways on from behind the last unit: to be done, or none."""
    return np.array([[need], [0], [0], [0]])[:, : int(need <= room)]


def _merge(stop: _Stop, behind: dict[Place, _Ways], budget: int) -> _Ways:
    """Return the ways on from a stop, given those from all places behind its unit."""
    parts = [np.empty((4, 0), np.int64)]
    for i, (move, to) in enumerate(stop.exits):
        after, kept = behind[to], move.kept_bytes
        start = after[_BYTES].searchsorted(move.need_bytes - kept, "right") - 1  # the cheapest of those under its own need
        end = after[_BYTES].searchsorted(budget - stop.least_bytes - kept, "right")
        way = np.arange(max(start, 0), end)
        size = np.maximum(after[_BYTES, way] + kept, move.need_bytes)
        parts.append(np.stack([size, after[_COST, way] + move.cost, np.full_like(way, i), way]))
    ways = np.concatenate(parts, axis=1)
    order = ways[_BYTES].argsort(kind="stable")
    order = order[np.diff(np.minimum.accumulate(ways[_COST, order]), prepend=_ANY) < 0]  # cheaper than all before it
    return ways[:, order[np.diff(ways[_BYTES, order], append=_ANY) > 0]]  # and of as many bytes the last


def _options(unit: Unit) -> list[Option]:
    return [*unit.options, unit.first] if unit.first else [*unit.options]


def _least_need(unit: Unit) -> int:
    return min(max(option.forward_bytes, min(option.backward_bytes)) for option in _options(unit))


def _share(problem: Problem, option: Option, keepers: Counter[int]) -> Fraction:
    return option.kept_bytes + sum((Fraction(problem.sizes[state], keepers[state]) for state in option.holds), Fraction(0))


def _hull(choices: list[tuple[Fraction, int]]) -> list[tuple[Fraction, int]]:
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
