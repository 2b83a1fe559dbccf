"""The additive knapsack: the best subset under one capacity, exactly, in integers.

States (weight, value) of the items seen so far are kept unless another is as light and worth as much (Nemhauser & Ullmann
1969). The items come by falling value per byte, so that each state has two bounds at hand: taking whole items from here
on until one does not fit is a solution, and taking the fitting part of that one too is more than any completion is worth
(Dantzig 1957). States that cannot beat the best solution found are dropped. There is no table over bytes and no rounding:
with the few distinct sizes that a network has, some hundred states decide what a table of n x 1e10 cells could not.

Known inefficiencies: items of one kind that differ a little in size at equal value per byte, and sums of subsets, leave the
bounds nothing to tell apart, and the states double with every item. Past `max_states` only the lightest state of each
interval of values goes on. What that can lose is stated as the gap, and runs of this sort take seconds. Every state of
every item leaves four bytes to find the way back.

Source: Nemhauser and Ullmann, "Discrete dynamic programming and capital allocation", Management Science 1969; Dantzig,
"Discrete-variable extremum problems", Operations Research 1957.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from revzoo.planning.problem import Problem, end_bytes, peak, walk

_Ints = NDArray[Any]
_UP = 1 + 2e-15  # above the rounding of one product and one quotient: a bound must not come out too low

Reading = Literal["peak", "static"]


@dataclass(frozen=True)
class Solution:
    """A subset, its sums, and how much better the optimum may be: gap 0.0 says that this is it.

    Args:
        chosen: indices, rising.
        gap: upper bound on (optimum - value) / optimum.
    """

    chosen: tuple[int, ...]
    value: int
    weight: int
    gap: float


def best_subset(values: Sequence[int], weights: Sequence[int], capacity: int, max_states: int = 200_000) -> Solution:
    """Return the subset of most value whose weight is at most `capacity`.

    Args:
        values: any integers; an item of no value is never chosen.
        weights: integers, at least 0.
        max_states: most states kept; only where it is reached can the gap be above 0.
    Raises: ValueError: not one weight per value, or a weight or the capacity is negative.
    """
    if min(capacity, *weights, 0) < 0:
        raise ValueError(f"Weights and capacity must be at least 0. Received: {min(weights, default=0)} and {capacity}.")
    able = [i for i, (value, weight) in enumerate(zip(values, weights, strict=True)) if value > 0 and weight <= capacity]
    items = sorted(able, key=lambda i: (weights[i] > 0, -Fraction(values[i], weights[i] or 1)))
    capacity = min(capacity, sum(weights[i] for i in items))
    value_to, weight_to = (_sums([column[i] for i in items]) for column in (values, weights))
    rates = np.array([values[i] / (weights[i] or 1) for i in items] + [0.0])

    worth, weight = np.zeros((2, 1), np.int64)  # of each state, by rising weight
    best, end = -1, (0, 0, 0)
    lost = doubt = 0  # by thinning: the optimum is at most best + lost, and at most doubt unless it is best
    origins: list[_Ints] = []
    for k in range(len(items) + 1):
        fit = weight_to.searchsorted(capacity - weight + weight_to[k], "right") - 1  # items k ... fit - 1 go in whole
        whole = worth + value_to[fit] - value_to[k]
        spare = capacity - weight - (weight_to[fit] - weight_to[k])
        most = whole + np.floor(spare * rates[fit] * _UP).astype(np.int64)
        top = int(whole.argmax())
        if whole[top] > best:
            best, end = int(whole[top]), (k, top, int(fit[top]))
        alive = np.flatnonzero(most > best)
        if len(alive) > max_states:
            grid = (worth[alive] - worth[alive[0]]) // -(-int(np.ptp(worth[alive]) + 1) // max_states)
            lightest = np.diff(grid, prepend=-1) > 0  # of each cell of the grid; it is the one of least worth, too
            closest = np.flatnonzero(lightest)[np.cumsum(lightest) - 1]
            lost += int((worth[alive] - worth[alive[closest]]).max())
            doubt = max(doubt, int(most[alive[~lightest]].max()))
            alive = alive[lightest]
        if not len(alive):
            break
        worth, weight, origin = _branch(worth[alive], weight[alive], values[items[k]], weights[items[k]], capacity)
        origins.append((2 * alive[origin // 2] + origin % 2).astype(np.int32))

    k, state, whole_to = end
    chosen = items[k:whole_to]
    for item, came in zip(reversed(items[:k]), reversed(origins[:k]), strict=True):
        state, taken = divmod(int(came[state]), 2)
        chosen += [item] * taken
    limit = min(best + lost, max(best, doubt))
    return Solution(tuple(sorted(chosen)), best, sum(weights[i] for i in chosen), (limit - best) / limit if limit else 0.0)


def _branch(worth: _Ints, weight: _Ints, value: int, size: int, capacity: int) -> tuple[_Ints, _Ints, _Ints]:
    """Return the states without and with one more item, undominated, and for each 2 x the state it was + the item's count."""
    room = int(weight.searchsorted(capacity - size, "right"))
    worth = np.concatenate([worth, worth[:room] + value])
    origin = np.concatenate([2 * np.arange(len(weight)), 2 * np.arange(room) + 1])
    weight = np.concatenate([weight, weight[:room] + size])
    order = weight.argsort(kind="stable")
    order = order[np.diff(np.maximum.accumulate(worth[order]), prepend=-1) > 0]  # worth more than all that are lighter
    order = order[np.diff(weight[order], append=capacity + 1) > 0]  # and of equal weights the last
    return worth[order], weight[order], origin[order]


def _sums(numbers: Sequence[int]) -> _Ints:
    return np.concatenate([[0], np.cumsum(numbers, dtype=np.int64)])


def solve_additive(problem: Problem, budget: int, reading: Reading = "peak") -> list[str] | None:
    """Return the schedule of the additive model: store the reversible steps whose bytes save most, invert the others.

    Bytes stored are added to those of the schedule that inverts whatever it can, m_o. This cannot see that the last
    steps store almost for free, nor what a shorter run leaves behind it: read as "peak", bytes mostly lie idle, yet the
    true peak can go over the budget; read as "static" it nearly always does. `timeline.solve` is exact; this is here to
    compare with.

    Args:
        budget: bytes.
        reading: of m_o. "peak": the peak of that schedule; "static": what it keeps from forward to backward.
    Returns: one mode per unit, or None where m_o is above the budget. Limits on runs are not looked at.
    Raises: ValueError: a unit can neither invert nor store.
    Source: Jiang et al., "An Efficient Training Framework for Reversible Neural Architectures", ECCV 2020, problem 6,
        without its table over bytes; nodes always store.
    """
    options = [{option.mode: option for option in unit.options} for unit in problem.units]
    steps = [k for k, unit in enumerate(problem.units) if unit.first and "invert" in options[k] and "store" in options[k]]
    modes = ["invert" if k in steps else "store" for k in range(len(options))]
    inverted = list(walk(problem, modes))
    if reading == "peak":
        other_bytes = peak(problem, modes)
    else:
        kept = sum(move.kept_bytes for move in inverted)
        other_bytes = problem.fixed_bytes + kept + end_bytes(problem, inverted[-1].held) - problem.loss_bytes
    if other_bytes > budget:
        return None
    stored = [options[k]["store"] for k in steps]
    saved = [inverted[k].cost - store.cost for k, store in zip(steps, stored, strict=True)]
    sizes = [store.kept_bytes + problem.bytes_of(store.holds, frozenset()) for store in stored]
    for i in best_subset(saved, sizes, budget - other_bytes).chosen:
        modes[steps[i]] = "store"
    return modes
