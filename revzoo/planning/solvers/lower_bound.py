"""What the units before a search state cost at least, given how many bytes they may keep: the bound that narrows the search.

For each search state, let h(m) be the lowest cost of a schedule that reaches it within the budget and keeps at most m bytes.
A convex function below h is known by its tangents: for each of a few hundred slopes s, t(s) is the smallest c + s m over all
such schedules. Going over an edge adds its cost and s times its bytes, several edges into one search state take the minimum,
and both are exact. An edge that needs d bytes is open to at most m = budget - d bytes: what costs c + s m beyond that is
replaced by the value at this m. So one pass over the search states yields all tangents. It is the dual of the linear relaxation
of the problem; of a chain of hundreds of units it is some millionths to thousandths below the optimum.

Source: the multiple-choice knapsack's linear relaxation, as in Sinha and Zoltners, Operations Research 1979, with a capacity
for every prefix.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from revzoo.planning.solvers.problem import Option, Place, Problem, Unit
from revzoo.planning.solvers.search_states import ABOVE_ALL, Layer, need_at_the_end

_SLOPES = 256  # of each of two kinds: those of the units' own modes, and a geometric grid beside them
_BEYOND = 16  # the grid reaches this factor further, for modes that also change what other units keep
_ROUNDING = 1e-9  # of the numbers that are added: far above the errors of a sum of thousands

_Floats = NDArray[np.float64]


class LowerBound:
    """Lower bounds on the cost of all schedules within a budget, and of those that end in given partial solutions.

    Args:
        problem: to be solved.
        layers: its search states within the budget.
        budget: limit for the peak [bytes].
    Cost: eight bytes for every slope and search state.
    """

    def __init__(self, problem: Problem, layers: Sequence[Layer], budget: int):
        self._room = budget - problem.fixed_bytes
        self._slopes = slopes = _choose_slopes(problem)
        self._tangents: list[dict[Place, _Floats]] = []
        tangents = {place: np.zeros_like(slopes) for place in layers[0]}
        for layer in layers:
            self._tangents.append(tangents)
            following: dict[Place, _Floats] = {}
            for place, node in layer.items():
                for edge, to in node.edges:
                    found = self._restrict(tangents[place], self._room - edge.need_bytes)
                    found += edge.cost + slopes * edge.kept_bytes
                    following[to] = np.minimum(following[to], found) if to in following else found
            tangents = following
        ends = []
        for place in layers[-1]:
            if (need := need_at_the_end(problem, place)) < ABOVE_ALL:
                cut = slopes * (self._room - need)
                ends.append(float((self._tangents[-1][place] - cut * (1 + _ROUNDING)).max()))
        self.cost = max(0.0, min(ends, default=0.0) * (1 - _ROUNDING))
        """What every schedule costs at least."""

    def _restrict(self, tangents: _Floats, most: int) -> _Floats:
        """Return the tangents of a function that ends at `most` bytes."""
        values = tangents - self._slopes * most
        steepest = int(values.argmax())  # the tangent there; less steep ones touch the function beyond
        restricted = tangents.copy()
        restricted[:steepest] = values[steepest] + self._slopes[:steepest] * most
        return restricted

    def is_above(self, limit: float, k: int, place: Place, sizes: NDArray[Any], costs: NDArray[Any]) -> NDArray[np.bool_]:
        """Return which partial solutions no schedule of a cost up to `limit` ends in.

        Args:
            limit: cost of a whole schedule.
            k: index of the unit that the partial solutions begin with.
            place: the search state before it.
            sizes, costs: of the partial solutions.
        """
        tangents, slopes, room = self._tangents[k][place], self._slopes, self._room - sizes
        # Two neighbouring tangents meet at so many bytes, which fall as slopes rise. Any tangent is a bound; this is the best.
        meetings = np.minimum.accumulate(np.diff(tangents) / np.diff(slopes))
        best = len(meetings) - np.searchsorted(meetings[::-1], room)
        cut = slopes[best] * room
        above: NDArray[np.bool_] = costs + tangents[best] - cut > limit + _ROUNDING * (limit + cut)
        return above


def _choose_slopes(problem: Problem) -> _Floats:
    """Return the slopes [cost per byte], rising from 0."""
    ratios = np.unique([ratio for unit in problem.units for ratio in _list_ratios(problem, unit)])
    if not ratios.size:
        return np.array([0.0, 1.0])
    own = ratios[np.unique(np.linspace(0, ratios.size - 1, _SLOPES).round().astype(int))]
    return np.unique(np.concatenate([[0.0], own, np.geomspace(ratios[0] / _BEYOND, ratios[-1] * _BEYOND, _SLOPES)]))


def _list_ratios(problem: Problem, unit: Unit) -> Iterator[float]:
    """Yield what one mode of a unit costs more than another for each byte that it keeps less."""

    def count_bytes(option: Option) -> int:
        return option.kept_bytes + problem.bytes_of(option.kept_states, frozenset())

    options = [(count_bytes(option), option.cost) for option in (*unit.options, *([unit.first] if unit.first else ()))]
    for size, cost in options:
        for larger, cheaper in options:
            if size < larger and cost > cheaper:
                yield (cost - cheaper) / (larger - size)
