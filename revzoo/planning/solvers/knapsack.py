"""The additive knapsack: the most valuable subset of items under one capacity, exactly, in integers.

`solver="knapsack"` uses it to repeat the published model; `timeline.py` is what plans are made with. A general solver does not
replace it: HiGHS (`scipy.optimize.milp`) is correct on the same tests only within floating-point tolerances, takes up to 3 s
for the 200 items of a network that take 0.02 s here, and after 20 s has only worse solutions to the adversarial ones.

The search keeps partial solutions (weight, value), one for each subset of the items seen so far that no other subset beats in
both (Nemhauser & Ullmann 1969). Items are sorted by falling value per byte. Each partial solution then has two bounds: adding
whole items from here on until one does not fit is a solution, and adding the fitting part of that one as well is worth more
than any completion (Dantzig 1957). Partial solutions whose upper bound does not exceed the best solution so far are dropped.
There is no table over bytes and no rounding of sizes: with the few distinct sizes of a network some hundred of them suffice,
where a table would have n x 1e10 cells.

Known inefficiencies: the bounds cannot tell apart items of nearly equal value per byte that differ a little in size, nor pure
sums of subsets, and the number of partial solutions then doubles with every item. Above `max_partials` only the lightest of
each interval of values is kept. The possible loss is reported as the gap. Such runs take seconds. Every partial solution of
every item leaves four bytes to reconstruct the subset.

Source: Nemhauser and Ullmann, "Discrete dynamic programming and capital allocation", Management Science 1969; Dantzig,
"Discrete-variable extremum problems", Operations Research 1957.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from revzoo.planning.solvers.problem import Problem
from revzoo.planning.solvers.schedule import follow_schedule, loss_need_bytes, peak
from revzoo.runtime.mode import Mode

_Ints = NDArray[Any]
_UP = 1 + 2e-15  # more than the rounding errors of one product and one quotient: an upper bound must not come out too low

Baseline = Literal["peak", "static"]


@dataclass(frozen=True)
class Solution:
    """A subset of the items.

    Args:
        chosen: indices of its items, rising.
        value: sum of their values.
        weight: sum of their weights.
        gap: upper bound on (optimum - value) / optimum; 0.0 says that this is the optimum.
    """

    chosen: tuple[int, ...]
    value: int
    weight: int
    gap: float


def choose_subset(values: Sequence[int], weights: Sequence[int], capacity: int, max_partials: int = 200_000) -> Solution:
    """Return the most valuable subset whose weight is at most `capacity`.

    Args:
        values: one integer per item; an item whose value is 0 or negative is never chosen.
        weights: one integer per item, at least 0.
        capacity: limit for the sum of the chosen weights, at least 0.
        max_partials: most partial solutions that are kept; the gap is 0 unless this limit is reached.
    Raises: ValueError: not one weight per value, or a weight or the capacity is negative.
    """
    if min(capacity, *weights, 0) < 0:
        raise ValueError(f"Weights and capacity must be at least 0. Received: {min(weights, default=0)} and {capacity}.")
    usable = [i for i, (value, weight) in enumerate(zip(values, weights, strict=True)) if value > 0 and weight <= capacity]
    items = sorted(usable, key=lambda i: (weights[i] > 0, -Fraction(values[i], weights[i] or 1)))
    capacity = min(capacity, sum(weights[i] for i in items))
    value_to, weight_to = (_prefix_sums([column[i] for i in items]) for column in (values, weights))
    rates = np.array([values[i] / (weights[i] or 1) for i in items] + [0.0])

    worth, weight = np.zeros((2, 1), np.int64)  # value and weight of each partial solution, by rising weight
    best, end = -1, (0, 0, 0)
    lost = doubt = 0  # by thinning: the optimum is at most best + lost, and if it is above best, at most doubt
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
        if len(alive) > max_partials:
            grid = (worth[alive] - worth[alive[0]]) // -(-int(np.ptp(worth[alive]) + 1) // max_partials)
            lightest = np.diff(grid, prepend=-1) > 0  # of each cell of the grid; it also has the smallest value there
            closest = np.flatnonzero(lightest)[np.cumsum(lightest) - 1]
            lost += int((worth[alive] - worth[alive[closest]]).max())
            doubt = max(doubt, int(most[alive[~lightest]].max()))
            alive = alive[lightest]
        if not len(alive):
            break
        worth, weight, origin = _branch(worth[alive], weight[alive], values[items[k]], weights[items[k]], capacity)
        origins.append((2 * alive[origin // 2] + origin % 2).astype(np.int32))

    k, partial, whole_to = end
    chosen = items[k:whole_to]
    for item, came in zip(reversed(items[:k]), reversed(origins[:k]), strict=True):
        partial, taken = divmod(int(came[partial]), 2)
        chosen += [item] * taken
    limit = min(best + lost, max(best, doubt))
    return Solution(tuple(sorted(chosen)), best, sum(weights[i] for i in chosen), (limit - best) / limit if limit else 0.0)


def _branch(worth: _Ints, weight: _Ints, value: int, size: int, capacity: int) -> tuple[_Ints, _Ints, _Ints]:
    """Return the undominated partial solutions with and without one more item: values, weights, origins.

    The origin of a partial solution is twice the index of the one that it extends, plus 1 if it contains the item.
    """
    room = int(weight.searchsorted(capacity - size, "right"))
    worth = np.concatenate([worth, worth[:room] + value])
    origin = np.concatenate([2 * np.arange(len(weight)), 2 * np.arange(room) + 1])
    weight = np.concatenate([weight, weight[:room] + size])
    order = weight.argsort(kind="stable")
    order = order[np.diff(np.maximum.accumulate(worth[order]), prepend=-1) > 0]  # of more value than all lighter ones
    order = order[np.diff(weight[order], append=capacity + 1) > 0]  # and of equal weights the last
    return worth[order], weight[order], origin[order]


def _prefix_sums(numbers: Sequence[int]) -> _Ints:
    return np.concatenate([[0], np.cumsum(numbers, dtype=np.int64)])


def solve_knapsack(problem: Problem, budget: int, baseline: Baseline = "peak") -> list[Mode] | None:
    """Return the schedule of the additive model: store the steps that save most time per byte, invert all others.

    The model adds the bytes of the stored steps to a baseline m_o, that of the schedule that inverts every step that it can.
    It cannot see that the last steps store almost for free, nor that every further run keeps a pair of states. With the
    baseline "peak" much of the budget stays unused, and yet the true peak can exceed it; with "static" it nearly always does.
    `solve_timeline` is exact. This function is here to compare with.

    Args:
        budget: limit for the peak of all memory together [bytes].
        baseline: what m_o is. "peak": the peak of the inverted schedule; "static": what it keeps from forward to backward.
    Returns: one mode per unit, or None where m_o is above the budget. The limit on runs of inverted steps is not checked.
    Raises: ValueError: a unit can neither invert nor store.
    Source: Jiang et al., "An Efficient Training Framework for Reversible Neural Architectures", ECCV 2020, problem 6,
        without its table over bytes; nodes always store.
    """
    options = [{option.mode: option for option in unit.options} for unit in problem.units]
    steps = [k for k, unit in enumerate(problem.units) if unit.first and options[k].keys() >= {Mode.INVERT, Mode.STORE}]
    modes = [Mode.INVERT if k in steps else Mode.STORE for k in range(len(options))]
    inverted = list(follow_schedule(problem, modes))
    if baseline == "peak":
        baseline_bytes = peak(problem, modes)
    else:
        kept = sum(edge.kept_bytes for edge in inverted)
        baseline_bytes = problem.fixed_bytes + kept + loss_need_bytes(problem, inverted[-1].after.held) - problem.loss_bytes
    if baseline_bytes > budget:
        return None
    stored = [options[k][Mode.STORE] for k in steps]
    saved = [inverted[k].cost - store.cost for k, store in zip(steps, stored, strict=True)]
    sizes = [store.kept_bytes + problem.bytes_of(store.kept_states, frozenset()) for store in stored]
    for i in choose_subset(saved, sizes, budget - baseline_bytes).chosen:
        modes[steps[i]] = Mode.STORE
    return modes
