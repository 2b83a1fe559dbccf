"""Which tensors to store so that they and the largest part that is run again take the least memory together.

This is Re-forwarding as it was published, for comparison: `solver="reforwarding"`. Its cost (equation 1) is the sum of what is
stored plus the largest part between stored tensors. It knows no budget, no time and no gradients, and counts what backward
has freed already as still there, so it is not the peak; `planning/reforwarding/search.py` is what plans are made with.

Linear graphs (Algorithm 1): let a part cost at most C. The cheapest vertices to store are then a shortest path from the first
vertex to the last. The best path of all C, with its true largest part, is the optimum.

Arbitrary graphs (Algorithms 2 to 5): a part is run again from one stored vertex to one other, so it must be a closed set
(`closed_set.py`). For every C, the tree of closed sets is walked from its root, and those that cost more than C are divided.

One thing is left out: a C that cannot lead to a lower cost. The smaller C, the more is stored, so what is stored for a larger C
is a bound.

This is no optimum of equation 1 itself. A part with several stored inputs, such as the addition of a residual block, could be
dropped as well, but it is no closed set.

Known inefficiencies: the costs of all runs of a chain are listed, n^2 / 2 of them. A shortest path takes O(n), with a queue of
the best predecessors, so all of them O(n^3) at worst; as a rule some hundred are tried, and 1,000 vertices take a second.

Source: Feng and Huang, "Cutting Down Training Memory by Re-forwarding", sections 4 and 5.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from revzoo.planning.solvers.closed_set import ClosedSet, Graph, divide, list_bits, list_components, make_chain


@dataclass(frozen=True)
class Split:
    """What is stored and what is run again.

    Args:
        stored: vertices, rising; the first and the last are always among them.
        parts: what is run again together: the other vertices, those with an edge between them in one part.
        stored_cost: of the stored vertices.
        part_cost: of the part that costs most.
    """

    stored: tuple[int, ...]
    parts: tuple[tuple[int, ...], ...]
    stored_cost: int
    part_cost: int

    @property
    def cost(self) -> int:
        """Equation 1: the sum of what is stored, and the largest part."""
        return self.stored_cost + self.part_cost


def split(graph: Graph, stored: Sequence[int]) -> Split:
    """Return what equation 1 charges if these vertices are stored."""
    missing = (1 << len(graph.costs)) - 1
    for v in stored:
        missing &= ~(1 << v)
    parts = list(list_components(graph, missing))
    return Split(
        stored=tuple(sorted(stored)),
        parts=tuple(tuple(list_bits(part)) for part in parts),
        stored_cost=sum(graph.costs[v] for v in stored),
        part_cost=max((graph.sum_costs(part) for part in parts), default=0),
    )


def split_chain(costs: Sequence[int]) -> Split:
    """Return the split of a linear graph with the lowest cost (Algorithm 1).

    Args: costs: of the vertices [bytes], in order, at least 0.
    Raises: ValueError: no vertices, or a negative cost.
    """
    graph = make_chain(costs)
    chain = _Chain(list(costs), [0] * (len(costs) - 1))
    return _try_costs(graph, {0} | chain.list_costs(), lambda limit: chain.find_path(limit)[0])


def split_graph(graph: Graph) -> Split:
    """Return the split into closed sets with the lowest cost (Algorithm 5)."""
    if len(graph.costs) == 1:
        return split(graph, [0])
    root = _Node(graph, divide(graph))
    ends = {0, len(graph.costs) - 1}
    return _try_costs(graph, {0, root.cost}.union(*root.list_costs()), lambda limit: sorted(ends.union(root.expand(limit)[1])))


def _try_costs(graph: Graph, costs: set[int], store: Callable[[int], Sequence[int]]) -> Split:
    """Return the best split of all that `store` finds for any limit to the cost of a part.

    The sum of what is stored falls as the limit rises. So between two limits it is at least that of the upper one, and the cost
    at least that and the lower limit. Where this is no better than the best split, the limits between are not tried.
    """
    limits = sorted(costs)
    tried: dict[int, int] = {}  # by limit: what is stored
    best: Split | None = None

    def try_limit(at: int) -> int:
        nonlocal best
        if at not in tried:
            found = split(graph, store(limits[at]))
            tried[at] = found.stored_cost
            if best is None or found.cost < best.cost:
                best = found
        return tried[at]

    waiting = [(0, len(limits) - 1)]
    while waiting:
        low, high = waiting.pop()
        stored = try_limit(high)
        assert best is not None
        high = min(high - 1, bisect_left(limits, best.cost - stored) - 1)  # those that can still be better
        if low > high:
            continue
        middle = (low + high) // 2
        waiting += [(low, middle), (middle + 1, high)] if low < high else [(low, high)]
    assert best is not None
    return best


class _Chain:
    """Vertices in a row, with closed sets between them; those that cost 0 are edges.

    Args:
        costs: of the vertices.
        between: of the closed sets between each two.
    """

    def __init__(self, costs: Sequence[int], between: Sequence[int]):
        self._costs, self._between = costs, between
        whole = [cost + inside for cost, inside in zip(costs[1:], between, strict=True)]
        self._sums = list(accumulate(whole, initial=0))  # of all behind the first vertex, up to each

    def list_costs(self) -> set[int]:
        """Return the costs of all parts between two vertices."""
        after = self._sums
        before = [total - cost for total, cost in zip(after, [0, *self._costs[1:]], strict=True)]
        return {before[j] - after[i] for j in range(1, len(after)) for i in range(j)}

    def find_path(self, limit: int, divide: Callable[[int], int] | None = None) -> tuple[list[int], int]:
        """Return which vertices of the cheapest path are stored, and their cost: a shortest path in the accessibility graph.

        Args:
            limit: most that a part may cost.
            divide: the cost of what is stored in a closed set by itself, given its number, where it costs more than the limit.
        """
        costs, sums = self._costs, self._sums
        best = [costs[0]]
        come_from = [-1]
        first = 0  # from here on a part up to j is within the limit
        queue = deque([0])  # vertices from `first` on, by rising cost of the path, none with a cheaper one behind it
        for j in range(1, len(costs)):
            inside = self._between[j - 1]
            if inside > limit:
                assert divide is not None
                first, cost, origin = j, best[j - 1] + divide(j - 1), j - 1
                queue.clear()
            else:
                while sums[j] - costs[j] - sums[first] > limit:
                    first += 1
                while queue[0] < first:
                    queue.popleft()
                origin = queue[0]
                cost = best[origin]
            best.append(cost + costs[j])
            come_from.append(origin)
            while queue and best[queue[-1]] >= best[j]:
                queue.pop()
            queue.append(j)
        path, at = [], len(costs) - 1
        while at >= 0:
            path.append(at)
            at = come_from[at]
        return path[::-1], best[-1]


class _Node:
    """A closed set of the division tree, as Algorithm 5 decides about it."""

    def __init__(self, graph: Graph, closed: ClosedSet):
        self.cost = closed.cost
        self._vertices = closed.vertices
        costs = [graph.costs[v] for v in closed.vertices]
        self._vertex_cost = sum(costs)
        self._children = [_Node(graph, child) for child in closed.children]
        between = [child.cost for child in self._children]
        self._chain = _Chain([0, *costs, 0], between) if closed.kind == "splittable" else None

    def list_costs(self) -> Iterator[set[int]]:
        """Yield the costs that parts within it can have."""
        yield {child.cost for child in self._children} if self._chain is None else self._chain.list_costs()
        for child in self._children:
            yield from child.list_costs()

    def expand(self, limit: int) -> tuple[int, list[int]]:
        """Return the cost of what is stored in it and these vertices, if no part may cost more than the limit."""
        if self.cost <= limit:
            return 0, []
        divided = {i: child.expand(limit) for i, child in enumerate(self._children) if child.cost > limit}
        inner = [v for _, vertices in divided.values() for v in vertices]
        if self._chain is not None:
            path, cost = self._chain.find_path(limit, lambda i: divided[i][0])
            return cost, inner + [self._vertices[k - 1] for k in path[1:-1]]
        return self._vertex_cost + sum(cost for cost, _ in divided.values()), inner + list(self._vertices)
