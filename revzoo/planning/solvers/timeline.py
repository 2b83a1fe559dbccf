"""The cheapest schedule whose peak fits a budget, exactly.

What a unit keeps is freed before the preceding units run backward. It burdens only the units that follow it, and what the last
units keep costs almost nothing. Choosing the modes is thus a multiple-choice knapsack with a capacity for every prefix, which
is weakly NP-hard. The additive knapsack of `knapsack.py` is the special case in which only the total counts.

The search is dynamic programming. A *search state* before a unit is all that this unit and the following ones must know: the
length of the run of inverted steps that ends there, and the states (tensors) that the preceding units keep; after an inverted
layer, whether the run goes on, and in halves; with look-ahead also what the recovery of the unit before takes, and whether all
units from here on drop nothing. A forward pass finds the search states that can be
reached within the budget, and the fewest bytes that a schedule keeps on arrival. A backward pass,
from the last unit to the first, finds the partial solutions of every search state: assignments of modes to all units after it,
as pairs (bytes, cost), where bytes is the peak of these units if the preceding ones keep nothing. An edge that needs d bytes
and keeps m extends a pair (b, c) to (max(d, m + b), c + its cost). Both entries grow with those of the pair that was extended.
A pair that another one beats in both can therefore be dropped for good (Nemhauser & Ullmann 1969), and so can one that exceeds
the budget even with the fewest bytes kept before it. What remains before the first unit are whole schedules.

Known inefficiencies: the number of partial solutions is exponential at worst. For 100 steps of two kinds it reached some
thousands, for 100 different steps some tens of thousands, because many of them share their largest need. Search states with
different tensors or recoveries are kept apart even where one is never better than the other, and so are different lengths of a
run if that is limited. All partial solutions stay in memory (32 bytes each) to reconstruct the schedule. Every budget is a new
search.

Source: Nemhauser and Ullmann, "Discrete dynamic programming and capital allocation", Management Science 1969, with a
maximum in place of a sum.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from revzoo.planning.solvers.problem import Edge, Place, Problem, list_edges, loss_need_bytes

_Partials = NDArray[np.int64]  # partial solutions, one per column; by rising bytes and falling cost
_BYTES, _COST, _EDGE, _REST = range(4)  # their rows: _EDGE indexes the node's edges, _REST the successor's partial solutions
_ANY = 1 << 62  # a budget or cost above all


@dataclass
class _Node:
    """A search state that can be reached within the budget.

    Args:
        min_bytes: fewest bytes kept before it by a schedule that reaches it.
        edges: one for each mode of the next unit, with the search state that it leads to.
    """

    min_bytes: int
    edges: list[tuple[Edge, Place]] = field(default_factory=list)


def solve_timeline(problem: Problem, budget: int) -> list[str] | None:
    """Return the cheapest schedule whose peak is at most `budget` bytes; among equal costs, one with the lowest peak.

    Returns: one mode per unit, or None where nothing fits: see `minimize_peak`.
    """
    budget = min(budget, _ANY)
    layers = _reach_search_states(problem, budget)
    partials = [
        {place: _end_partial(_need_at_the_end(problem, place), budget - node.min_bytes) for place, node in layers[-1].items()}
    ]
    for layer in reversed(layers[:-1]):
        partials.append({state: _extend_partials(node, partials[-1], budget) for state, node in layer.items()})
    (state,) = layers[0]
    if not partials[-1][state].size:
        return None
    modes, column = [], -1
    for layer in layers[:-1]:
        chosen = partials.pop()[state][:, column]
        edge, state = layer[state].edges[chosen[_EDGE]]
        modes.append(edge.mode)
        column = chosen[_REST]
    return modes


def minimize_peak(problem: Problem) -> tuple[int, list[str]]:
    """Return the smallest peak that a schedule can have [bytes], and the cheapest schedule with that peak.

    Raises: ValueError: no schedule is allowed, whatever the budget.
    """
    layers = _reach_search_states(problem, _ANY)
    rest = {place: _need_at_the_end(problem, place) for place in layers[-1]}
    for layer in reversed(layers[:-1]):
        rest = {
            state: min((max(edge.need_bytes, edge.kept_bytes + rest[to]) for edge, to in node.edges), default=_ANY)
            for state, node in layer.items()
        }
    smallest = problem.fixed_bytes + min(rest.values())
    modes = solve_timeline(problem, smallest)
    if modes is None:
        raise ValueError("Every schedule has a unit without a mode that is allowed there.")
    return smallest, modes


def _reach_search_states(problem: Problem, budget: int) -> list[dict[Place, _Node]]:
    """Return the search states that can be reached within the budget: before each unit, and after the last."""
    longest = problem.max_invert_run
    used_later = [frozenset(problem.pair_after)]  # for each unit, from the last: the states that it or a later one refers to
    for unit in reversed(problem.units):
        kept_states = (option.kept_states for option in unit.options)
        used_later.append(used_later[-1].union(unit.pair, unit.beside, unit.inputs, *kept_states))
    used_later.pop()
    layers = [{Place(): _Node(problem.fixed_bytes)}]
    for k in range(len(problem.units)):
        following: dict[Place, _Node] = {}
        matter = used_later.pop()
        for place, node in layers[-1].items():
            for edge in list_edges(problem, k, place):
                after = edge.after
                if node.min_bytes + edge.need_bytes > budget or (longest is not None and after.run > longest):
                    continue
                run = min(after.run, 1) if longest is None else after.run  # only a limit needs the length
                to = after._replace(run=run, held=after.held & matter)
                node.edges.append((edge, to))
                kept = node.min_bytes + edge.kept_bytes
                successor = following.setdefault(to, _Node(kept))
                successor.min_bytes = min(successor.min_bytes, kept)
        layers.append(following)
    return layers


def _need_at_the_end(problem: Problem, place: Place) -> int:
    is_open = place.awaited or place.goes_on  # a recovery that has to be begun, or a run that has to go on
    return _ANY + 1 if is_open else loss_need_bytes(problem, place.held)


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
    order = order[np.diff(np.minimum.accumulate(partials[_COST, order]), prepend=_ANY) < 0]  # cheaper than all before it
    return partials[:, order[np.diff(partials[_BYTES, order], append=_ANY) > 0]]  # and of as many bytes the last
