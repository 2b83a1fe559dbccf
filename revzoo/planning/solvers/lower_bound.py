"""What the units before a search state cost at least, given how many bytes they may keep: the bound that narrows the search.

For each search state, let h(m) be the lowest cost of a schedule that reaches it within the budget and keeps at most m bytes.
A convex function below h is known by its tangents: for each of a few hundred slopes s, t(s) is the smallest c + s m over all
such schedules. Going over an edge adds its cost and s times its bytes, several edges into one search state take the minimum,
and both are exact. An edge that needs d bytes is open to at most m = budget - d bytes: what costs c + s m beyond that is
replaced by the value at this m. So one pass over the search states yields all tangents, and further passes have more slopes
near those that turned out to matter. The bound is the dual of the linear relaxation of the problem. For a chain of hundreds of
units it is some millionths below the optimum, for one with two kinds of units some thousandths.

Source: the multiple-choice knapsack's linear relaxation, as in Sinha and Zoltners, Operations Research 1979, with a capacity
for every prefix.
"""

from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from revzoo.planning.solvers.problem import Option, Problem, Unit
from revzoo.planning.solvers.schedule import Edge, Place, loss_need_bytes
from revzoo.planning.solvers.search_states import Layer

_SLOPES = 256  # of each of two kinds: those of the units' own modes, and a geometric grid
_BEYOND = 16  # the grid reaches this factor further, for modes that also change what other units keep
_ROUNDS = 4  # of slopes near those that the bound comes from
_BESIDE = 33  # new slopes from one neighbour of such a slope to the other
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
        self._layers, self._room = layers, budget - problem.fixed_bytes
        self._needs = {place: loss_need_bytes(problem, place.held) for place in layers[-1]}
        self._slopes = _choose_slopes(problem)
        self.cost = self._measure()
        """What every schedule costs at least."""
        for _ in range(_ROUNDS):
            self._slopes = self._refine_slopes()
            self.cost = max(self.cost, self._measure())

    def _measure(self) -> float:
        """Find the tangents at all search states, and return the bound on the cost of all schedules."""
        self._tangents: list[dict[Place, _Floats]] = []
        tangents = {place: np.zeros_like(self._slopes) for place in self._layers[0]}
        for layer in self._layers:
            self._tangents.append(tangents)
            following: dict[Place, _Floats] = {}
            for place, node in layer.items():
                for edge, to in node.edges:
                    found, _ = self._extend(tangents[place], edge)
                    following[to] = np.minimum(following[to], found) if to in following else found
            tangents = following
        bound, _, _ = min(self._list_ends(), default=(0.0, 0, None), key=itemgetter(0))
        return max(0.0, bound * (1 - _ROUNDING))

    def _list_ends(self) -> Iterator[tuple[float, int, Place]]:
        """Yield for each last search state the bound on the schedules that end there, the slope that gives it, and itself."""
        for place, need in self._needs.items():
            cut = self._slopes * (self._room - need)
            bounds = self._tangents[-1][place] - cut * (1 + _ROUNDING)
            best = int(bounds.argmax())
            yield float(bounds[best]), best, place

    def _refine_slopes(self) -> _Floats:
        """Return the slopes, with more of them near those that the bound on all schedules comes from."""
        ends = list(self._list_ends())
        if not ends:
            return self._slopes
        _, slope, to = min(ends, key=itemgetter(0))
        used = {slope}
        for k in reversed(range(len(self._layers) - 1)):
            nearest: tuple[float, int, Place] | None = None
            for place, node in self._layers[k].items():
                for edge, following in node.edges:
                    if following == to:
                        found, steepest = self._extend(self._tangents[k][place], edge)
                        if nearest is None or found[slope] < nearest[0]:
                            nearest = float(found[slope]), max(slope, steepest), place
            assert nearest is not None
            _, slope, to = nearest
            used.add(slope)
        last = len(self._slopes) - 1
        borders = {(self._slopes[max(each - 1, 0)], self._slopes[min(each + 1, last)]) for each in used}
        return np.unique(np.concatenate([self._slopes, *(np.linspace(low, high, _BESIDE) for low, high in borders)]))

    def _extend(self, tangents: _Floats, edge: Edge) -> tuple[_Floats, int]:
        """Return the tangents after an edge, and the steepest one where the function ends."""
        found, steepest = self._restrict(tangents, self._room - edge.need_bytes)
        found += edge.cost + self._slopes * edge.kept_bytes
        return found, steepest

    def _restrict(self, tangents: _Floats, most: int) -> tuple[_Floats, int]:
        """Return the tangents of a function that ends at `most` bytes, and which of them is the steepest there."""
        values = tangents - self._slopes * most
        steepest = int(values.argmax())  # less steep ones touch the function beyond its end
        restricted = tangents.copy()
        restricted[:steepest] = values[steepest] + self._slopes[:steepest] * most
        return restricted, steepest

    def is_above(self, limit: float, k: int, place: Place, sizes: NDArray[Any], costs: NDArray[Any]) -> NDArray[np.bool_]:
        """Return which partial solutions no schedule of a cost up to `limit` ends in.

        Args:
            limit: cost of a whole schedule.
            k: index of the unit that the partial solutions begin with.
            place: the search state before it.
            sizes, costs: of the partial solutions.
        """
        tangents, slopes, room = self._tangents[k][place], self._slopes, self._room - sizes
        # Where two neighbouring tangents meet, in bytes: this falls as slopes rise. Any tangent is a bound; this is the best.
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
