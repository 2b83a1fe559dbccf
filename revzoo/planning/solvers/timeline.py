"""The cheapest schedule whose peak fits a budget, exactly.

What a unit keeps is freed before the preceding units run backward. It burdens only the units that follow it, and what the last
units keep costs almost nothing. Choosing the modes is thus a multiple-choice knapsack with a capacity for every prefix, which
is weakly NP-hard. The additive knapsack of `knapsack.py` is the special case in which only the total counts.

The search is dynamic programming. A *search state* is all that a unit and the following ones must know of those before it
(`Place`). A forward pass finds the search states that can be reached within the budget, and the fewest bytes that a schedule
keeps on arrival. A backward pass, from the last unit to the first, finds the partial solutions of every search state:
assignments of modes to all units after it, as pairs (bytes, cost), where bytes is the peak of these units if the preceding ones
keep nothing. An edge that needs d bytes and keeps m extends a pair (b, c) to (max(d, m + b), c + its cost). Both entries grow
with those of the pair that was extended. A pair that another one beats in both can therefore be dropped for good (Nemhauser &
Ullmann 1969), and so can one that exceeds the budget even with the fewest bytes kept before it. What remains before the first
unit are whole schedules.

Chains of some hundred steps, no two of which are equal, leave some millions of pairs. If there are more, only the lightest one
of each interval of costs is kept, and the possible loss is reported as the gap.

What units leave until forward ends is a second prefix sum, which the pairs do not have. The search first counts it as nothing:
if the schedule that this gives fits after all, it is the cheapest. Otherwise what is left counts as kept, which is too much
during backward, and the gap says how much cheaper the first schedule was.

Known inefficiencies: the number of partial solutions is exponential at worst. Search states with different tensors are kept
apart even where one is never better than the other, and so are different lengths of a run if that is limited. All partial
solutions stay in memory (32 bytes each) to reconstruct the schedule. Every budget is a new search.

Source: Nemhauser and Ullmann, "Discrete dynamic programming and capital allocation", Management Science 1969, with a
maximum in place of a sum.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from revzoo.planning.solvers.problem import Option, Problem
from revzoo.planning.solvers.schedule_totals import Edge, Place, cost, list_edges, loss_need_bytes, peak
from revzoo.runtime.mode import Mode

_Partials = NDArray[np.int64]  # partial solutions, one per column; by rising bytes and falling cost
_BYTES, _COST, _EDGE, _REST = range(4)  # their rows: _EDGE indexes the node's edges, _REST the successor's partial solutions
_ABOVE_ALL = 1 << 62  # a budget or cost above all
_MANY = 2**24  # partial solutions that are kept: half a GiB


@dataclass(frozen=True)
class Schedule:
    """A schedule within a budget.

    Args:
        modes: one per unit.
        gap: upper bound on (its cost - the lowest) / its cost; 0.0 says that none is cheaper.
    """

    modes: list[Mode]
    gap: float = 0.0


@dataclass
class _Node:
    """A search state that can be reached within the budget.

    Args:
        min_bytes: fewest bytes kept before it by a schedule that reaches it.
        edges: one for each mode of the next unit, with the search state that it leads to.
    """

    min_bytes: int
    edges: list[tuple[Edge, Place]] = field(default_factory=list)


_Layer = dict[Place, _Node]


class _TooManyError(Exception):
    """A search has more partial solutions than it may keep."""


def solve_timeline(problem: Problem, budget: int) -> list[Mode] | None:
    """Return the modes of `find_schedule`, or None where nothing fits: see `minimize_peak`."""
    schedule = find_schedule(problem, budget)
    return None if schedule is None else schedule.modes


def find_schedule(problem: Problem, budget: int) -> Schedule | None:
    """Return the cheapest schedule whose peak is at most `budget` bytes; among equal costs, one with the lowest peak.

    Returns: None where nothing fits. The gap is 0 unless the search had to drop partial solutions that may be better, or what
        units leave in forward stands in the way.
    """
    if problem.update_peak > budget:
        return None
    cheapest = _find_if_nothing_is_left(problem, budget)
    if cheapest is None or peak(problem, cheapest.modes) <= budget:
        return cheapest
    schedule = _find_if_nothing_is_left(_keep_what_is_left(problem), budget)
    if schedule is None:
        smallest, modes = minimize_peak(problem)
        if smallest > budget:
            return None
        schedule = Schedule(modes)
    least = cost(problem, cheapest.modes) * (1 - cheapest.gap)
    return Schedule(schedule.modes, max(0.0, 1 - least / max(1, cost(problem, schedule.modes))))


def _keep_what_is_left(problem: Problem) -> Problem:
    """Return a problem whose units keep until their backward what they really leave only until forward ends."""

    def keep(option: Option) -> Option:
        return replace(option, kept_bytes=option.kept_bytes + option.left_bytes, left_bytes=0)

    units = (
        replace(unit, options=tuple(map(keep, unit.options)), first=None if unit.first is None else keep(unit.first))
        for unit in problem.units
    )
    return replace(problem, units=tuple(units))


def _find_if_nothing_is_left(problem: Problem, budget: int) -> Schedule | None:
    """Return the cheapest schedule that fits if units leave nothing until forward ends; None where nothing does."""
    budget = min(budget, _ABOVE_ALL)
    layers = _reach_search_states(problem, budget)
    with suppress(_TooManyError):
        return _search(problem, layers, budget)
    # Outside of the block, where the error no longer holds the partial solutions of the first search.
    return _search(problem, layers, budget, most=max(1, _MANY // sum(map(len, layers))))


def _reach_search_states(problem: Problem, budget: int) -> list[_Layer]:
    """Return the search states that can be reached within the budget: before each unit, and after the last."""
    longest = problem.max_invert_run
    last_use = _find_last_uses(problem)
    layers = [{Place(): _Node(problem.fixed_bytes)}]
    for k in range(len(problem.units)):
        following: _Layer = {}
        for place, node in layers[-1].items():
            for edge in list_edges(problem, k, place):
                after = edge.after
                if node.min_bytes + edge.need_bytes > budget or (longest is not None and after.run > longest):
                    continue
                run = min(after.run, 1) if longest is None else after.run  # only a limit needs the length
                held = frozenset(state for state in after.held if last_use.get(state, -1) > k)
                to = after._replace(run=run, held=held)
                node.edges.append((edge, to))
                kept = node.min_bytes + edge.kept_bytes
                successor = following.setdefault(to, _Node(kept))
                successor.min_bytes = min(successor.min_bytes, kept)
        layers.append(following)
    return layers


def _find_last_uses(problem: Problem) -> dict[int, int]:
    """Return for every state the last unit that refers to it; the number of units if the loss does."""
    last_use: dict[int, int] = {}
    for k, unit in enumerate(problem.units):
        kept_states = (option.kept_states for option in unit.options)
        last_use.update(dict.fromkeys((*unit.pair, *unit.alive, *unit.inputs, *(s for kept in kept_states for s in kept)), k))
    return last_use | dict.fromkeys(problem.pair_after, len(problem.units))


def minimize_peak(problem: Problem) -> tuple[int, list[Mode]]:
    """Return the smallest peak that a schedule can have [bytes], and the cheapest schedule with that peak.

    Where what units leave in forward makes the peak, it is the smaller one of two schedules, found as in `find_schedule`.

    Raises: ValueError: no schedule is allowed, whatever the budget.
    """
    smallest, modes = _minimize_if_nothing_is_left(problem)
    actual = peak(problem, modes)
    if actual > smallest:
        _, others = _minimize_if_nothing_is_left(_keep_what_is_left(problem))
        actual, modes = min((actual, modes), (peak(problem, others), others), key=lambda each: each[0])
    return actual, modes


def _minimize_if_nothing_is_left(problem: Problem) -> tuple[int, list[Mode]]:
    layers = _reach_search_states(problem, _ABOVE_ALL)
    rest = {place: loss_need_bytes(problem, place.held) for place in layers[-1]}
    for layer in reversed(layers[:-1]):
        rest = {
            state: min((max(edge.need_bytes, edge.kept_bytes + rest[to]) for edge, to in node.edges), default=_ABOVE_ALL)
            for state, node in layer.items()
        }
    smallest = max(problem.fixed_bytes + min(rest.values()), problem.update_peak)
    schedule = _find_if_nothing_is_left(problem, smallest)
    if schedule is None:
        raise ValueError("Every schedule has a unit without a mode that is allowed there.")
    return smallest, schedule.modes


def _search(problem: Problem, layers: Sequence[_Layer], budget: int, most: int | None = None) -> Schedule | None:
    """Return the cheapest schedule; None where there is none.

    Args:
        problem: to be solved.
        layers: its search states within the budget.
        budget: limit for the peak [bytes].
        most: partial solutions to keep of each search state; None: all.
    Raises: _TooManyError: there are too many, and `most` is None.
    """
    partials = [
        {
            place: _end_partial(loss_need_bytes(problem, place.held), budget - node.min_bytes)
            for place, node in layers[-1].items()
        }
    ]
    kept = lost = 0
    for k in reversed(range(len(problem.units))):
        extended = {place: _extend_partials(node, partials[-1], budget) for place, node in layers[k].items()}
        if most is not None:
            lost += max((_find_interval(columns, most) - 1 for columns in extended.values()), default=0)
            extended = {place: _thin(columns, most) for place, columns in extended.items()}
        kept += sum(columns.shape[1] for columns in extended.values())
        if most is None and kept > _MANY:
            raise _TooManyError
        partials.append(extended)
    (state,) = layers[0]
    if not partials[-1][state].size:
        return None
    cost = int(partials[-1][state][_COST, -1])
    modes, column = [], -1
    for layer in layers[:-1]:
        chosen = partials.pop()[state][:, column]
        edge, state = layer[state].edges[chosen[_EDGE]]
        modes.append(edge.mode)
        column = chosen[_REST]
    return Schedule(modes, min(1.0, lost / max(1, cost)))


def _find_interval(partials: _Partials, most: int) -> int:
    """Return the length of the intervals of costs, of each of which one partial solution is kept; 1 keeps all."""
    costs = partials[_COST]
    return 1 if costs.size <= most else -(-int(costs[0] - costs[-1] + 1) // most)


def _thin(partials: _Partials, most: int) -> _Partials:
    """Return at most this many partial solutions: of each interval of costs the lightest."""
    intervals = (partials[_COST, :1] - partials[_COST]) // _find_interval(partials, most)
    return partials[:, np.diff(intervals, prepend=-1) > 0]


def _end_partial(need: int, room: int) -> _Partials:
    """Base case: one empty assignment after the last unit if the loss fits the budget, else none."""
    return np.array([[need], [0], [0], [0]])[:, : int(need <= room)]


def _extend_partials(node: _Node, following: dict[Place, _Partials], budget: int) -> _Partials:
    """Return the partial solutions of a node, given those of all search states after its unit."""
    columns = [np.empty((4, 0), np.int64)]
    for i, (edge, to) in enumerate(node.edges):
        rest, kept = following[to], edge.kept_bytes
        # Of the partial solutions whose bytes stay below the edge's own need, only the cheapest can be optimal.
        start = rest[_BYTES].searchsorted(edge.need_bytes - kept, "right") - 1
        end = rest[_BYTES].searchsorted(budget - node.min_bytes - kept, "right")
        chosen = np.arange(max(start, 0), end)
        size = np.maximum(rest[_BYTES, chosen] + kept, edge.need_bytes)
        columns.append(np.stack([size, rest[_COST, chosen] + edge.cost, np.full_like(chosen, i), chosen]))
    partials = np.concatenate(columns, axis=1)
    order = partials[_BYTES].argsort(kind="stable")
    order = order[np.diff(np.minimum.accumulate(partials[_COST, order]), prepend=_ABOVE_ALL) < 0]  # cheaper than all before it
    return partials[:, order[np.diff(partials[_BYTES, order], append=_ABOVE_ALL) > 0]]  # and of as many bytes the last
