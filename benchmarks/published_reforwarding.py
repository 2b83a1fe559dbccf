"""Re-forwarding as it was published, for comparison with `revzoo.plan`.

It stores the tensors which take the least memory together with the largest part that is run again. Its cost (equation 1) is the
sum of what is stored plus the largest part between stored tensors. It knows no budget, no time and no gradients, and counts
what backward has freed already as still there, so it is not the peak. `reforwarding_table.py` counts the peak of its plans.

Linear graphs (Algorithm 1): let a part cost at most C. The cheapest vertices to store are then a shortest path from the first
vertex to the last. The best path of all C, with its true largest part, is the optimum.

Arbitrary graphs (Algorithms 2 to 5): a part is run again from one stored vertex to one other, so it must be a closed set: no
edge leads from within it to elsewhere. A splittable closed set is a chain of closed sets between its splitting vertices. A
branched one consists of branches. Any other has a maximal split: the largest closed sets in it. So every graph is a tree of
closed sets, its division tree. For every C it is walked from its root, and those that cost more than C are divided. Sets of
vertices are integers; vertex v is the bit 1 << v.

One thing is left out: a C that cannot lead to a lower cost. The smaller C, the more is stored, so what is stored for a larger C
is a bound.

This is no optimum of equation 1 itself. A part with several stored inputs, such as the addition of a residual block, could be
dropped as well, but it is no closed set. Where the source contradicts itself, its definitions hold. Algorithm 4 forms a closed
set in line 3 if an edge to elsewhere exists; definition 1, third property, says that none does. Algorithm 4 takes all vertices
between two, or none of them; definition 1 takes the largest set of them that is closed.

Known inefficiencies: the costs of all runs of a chain are listed, n^2 / 2 of them. A shortest path takes O(n), so all of them
O(n^3) at worst; as a rule some hundred are tried. A maximal split looks at all pairs of vertices, each in O(n).

Source: Feng and Huang 2018, "Cutting Down Training Memory by Re-forwarding", sections 4 and 5.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Literal

from revzoo.graph.spans import Spans
from revzoo.graph.step_record import Record

Kind = Literal["edge", "splittable", "branched", "non-branched"]


@dataclass(frozen=True)
class Graph:
    """A computation graph: vertices are tensors, edges say what is computed from what.

    Args:
        costs: of every vertex [bytes], at least 0. Vertices are numbered in an order in which they can be computed.
        edges: pairs (i, j) with i < j: j is computed from i. The first vertex is the only one that is computed from no other,
            the last one the only one that no other is computed from.
    """

    costs: tuple[int, ...]
    edges: frozenset[tuple[int, int]]

    @cached_property
    def successors(self) -> list[int]:
        """By vertex: those computed from it, as a set of bits."""
        sets = [0] * len(self.costs)
        for i, j in self.edges:
            sets[i] |= 1 << j
        return sets

    @cached_property
    def neighbours(self) -> list[int]:
        """By vertex: those with an edge to or from it, as a set of bits."""
        sets = list(self.successors)
        for i, j in self.edges:
            sets[j] |= 1 << i
        return sets

    @cached_property
    def descendants(self) -> list[int]:
        """By vertex: those with a path from it, as a set of bits."""
        sets = list(self.successors)
        for i in reversed(range(len(sets))):
            for j in list_bits(self.successors[i]):
                sets[i] |= sets[j]
        return sets

    @cached_property
    def ancestors(self) -> list[int]:
        """By vertex: those with a path to it, as a set of bits."""
        sets = [0] * len(self.costs)
        for i, below in enumerate(self.successors):
            for j in list_bits(below):
                sets[j] |= sets[i] | 1 << i
        return sets

    def sum_costs(self, vertices: int) -> int:
        """Return the cost of a set of bits."""
        return sum(self.costs[v] for v in list_bits(vertices))


def make_chain(costs: Sequence[int]) -> Graph:
    """Return the linear graph of vertices with these costs."""
    return Graph(tuple(costs), frozenset(pairwise(range(len(costs)))))


def list_bits(vertices: int) -> Iterator[int]:
    """Yield the members of a set of bits, rising."""
    while vertices:
        lowest = vertices & -vertices
        yield lowest.bit_length() - 1
        vertices ^= lowest


@dataclass(frozen=True)
class ClosedSet:
    """A part of a graph between two vertices that has no edge to elsewhere: a node of the division tree (definition 9).

    Args:
        start, end: the two vertices; they do not belong to it.
        inside: its vertices, as a set of bits.
        cost: of its vertices.
        kind: how it is divided (definitions 4 to 6). An edge has no vertices and is not divided.
        vertices: of it, those that belong to none of its children: splitting vertices, or those between members of the maximal
            split.
        children: its division (definition 8); edges are left out, except in a splittable one.
    """

    start: int
    end: int
    inside: int
    cost: int
    kind: Kind
    vertices: tuple[int, ...] = ()
    children: tuple["ClosedSet", ...] = ()


def divide(graph: Graph) -> ClosedSet:
    """Return the division tree of a graph of two or more vertices (definition 9)."""
    last = len(graph.costs) - 1
    return _divide(graph, 0, last, (1 << last) - 2, (0, last) in graph.edges)


def _divide(graph: Graph, start: int, end: int, inside: int, has_edge: bool) -> ClosedSet:
    """Return the division tree of a closed set, with or without the edge from its start to its end."""
    cost = graph.sum_costs(inside)
    if not inside:
        return ClosedSet(start, end, inside, cost, "edge")
    splitting = [] if has_edge else _list_splitting_vertices(graph, start, end, inside)
    if splitting:
        pairs = list(pairwise([start, *splitting, end]))
        children = [_divide(graph, a, b, inside & _mask(a, b), bool(graph.successors[a] >> b & 1)) for a, b in pairs]
        return ClosedSet(start, end, inside, cost, "splittable", tuple(splitting), tuple(children))
    branches = list(list_components(graph, inside))
    if has_edge or len(branches) > 1:
        children = [_divide(graph, start, end, branch, False) for branch in branches]
        return ClosedSet(start, end, inside, cost, "branched", (), tuple(children))
    members = _find_maximal_split(graph, start, end, inside)
    rest = inside
    for _, _, member in members:
        rest &= ~member
    children = [_divide(graph, a, b, member, bool(graph.successors[a] >> b & 1)) for a, b, member in members]
    return ClosedSet(start, end, inside, cost, "non-branched", tuple(list_bits(rest)), tuple(children))


def _mask(a: int, b: int) -> int:
    """Return the set of all vertices between two. Without edges past a splitting vertex, order alone tells its sides apart."""
    return (1 << b) - (1 << (a + 1))


def _list_splitting_vertices(graph: Graph, start: int, end: int, inside: int) -> list[int]:
    """Return the splitting vertices of a closed set without the edge from its start to its end (Algorithm 2).

    All vertices have paths to or from a splitting one, and none of the former has an edge to one of the latter. In an order in
    which vertices can be computed, these are the vertices that no edge passes.
    """
    furthest = (graph.successors[start] & inside).bit_length() - 1
    splitting = []
    for v in list_bits(inside):
        if furthest <= v:
            splitting.append(v)
        furthest = max(furthest, (graph.successors[v] & (inside | 1 << end)).bit_length() - 1)
    return splitting


def list_components(graph: Graph, vertices: int) -> Iterator[int]:
    """Yield the connected components of a set of vertices; of a closed set, its branches (Algorithm 3)."""
    while vertices:
        component = _grow(graph, vertices & -vertices, vertices)
        yield component
        vertices &= ~component


def _grow(graph: Graph, seeds: int, within: int) -> int:
    """Return all vertices that are connected with some, by edges between vertices of a set."""
    grown = new = seeds & within
    while new:
        lowest = new & -new
        new ^= lowest
        more = graph.neighbours[lowest.bit_length() - 1] & within & ~grown
        grown |= more
        new |= more
    return grown


def _find_maximal_split(graph: Graph, start: int, end: int, inside: int) -> list[tuple[int, int, int]]:
    """Return start, end and vertices of the largest closed sets in a non-branched one (Algorithm 4).

    Edges, which are closed sets without vertices, are left out.
    """
    ends = [start, *list_bits(inside), end]
    found: list[tuple[int, int, int]] = []
    for i, a in enumerate(ends):
        below = graph.descendants[a] & inside
        for b in reversed(ends[i + 1 :]):
            between = below & graph.ancestors[b]
            if not between or (a, b) == (start, end):
                continue
            allowed = between | 1 << a | 1 << b
            open_ones = 0
            for v in list_bits(between):
                if graph.neighbours[v] & ~allowed:
                    open_ones |= 1 << v
            closed = between & ~_grow(graph, open_ones, between)
            if closed:
                found.append((a, b, closed))
    largest: list[tuple[int, int, int]] = []
    taken = 0
    for a, b, closed in sorted(found, key=lambda each: -each[2].bit_count()):
        if not closed & taken:
            taken |= closed
            largest.append((a, b, closed))
        assert not closed & ~taken, "the members of a maximal split are disjoint"
    return sorted(largest)


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


def choose_as_published(record: Record) -> tuple[Spans, Split]:
    """Return the spans that Re-forwarding as published chooses, and the split of the graph that they run."""
    graph, makers = make_graph(record)
    chosen = split_graph(graph)
    return make_spans(record, makers, chosen), chosen


def make_graph(record: Record) -> tuple[Graph, list[int]]:
    """Return the graph of a recorded step, and the atom of every vertex but the first and the last.

    Vertices are the atoms that allocate something which outlives them, their cost is its size, and edges are reads. What is
    computed from inputs alone follows a first vertex of cost 0, and what nothing reads leads to a last one.
    """
    costs: dict[int, int] = {}  # by atom
    for storage in record.storages:
        costs[storage.born] = costs.get(storage.born, 0) + storage.bytes
    makers = sorted(costs)
    vertex = {atom: number for number, atom in enumerate(makers, 1)}
    of_node = {node: vertex[storage.born] for storage in record.storages for node in storage.nodes}
    last = len(makers) + 1
    edges = {
        (of_node[each], vertex[i])
        for i, atom in enumerate(record.atoms)
        for each in atom.reads
        if i in vertex and each in of_node and of_node[each] < vertex[i]
    }
    edges |= {(0, v) for v in range(1, last) if v not in {b for _, b in edges}}
    edges |= {(v, last) for v in range(last) if v not in {a for a, _ in edges}}
    return Graph((0, *(costs[i] for i in makers), 0), frozenset(edges)), makers


def make_spans(record: Record, makers: Sequence[int], chosen: Split) -> Spans:
    """Return a split of a graph as it is run: what is stored is kept, and every part is recovered by itself.

    A span is a run of atoms: those of a part, and stored ones whose gradients need some of it. Two parts become one span if the
    gradient of a stored atom needs something of the first, and the second is computed before that atom; the first would have to
    be recovered twice otherwise, which equation 1 does not know. So do parts whose atoms take turns, as in branches that a
    module computes side by side. What every plan keeps is kept here too: small tensors that are not made again, and what
    atoms make or read that may not run again.

    Args:
        record: of the graph.
        makers: the atom of every vertex.
        chosen: the split.
    """
    stored = {makers[v - 1] for v in chosen.stored[1:-1]}
    fixed = {node for atom in record.atoms if not atom.is_repeatable for node in (*atom.makes, *atom.reads)}
    parts = [{makers[v - 1] for v in part} for part in chosen.parts]
    kept = [s for s in record.storages if s.born in stored or s.is_small or not fixed.isdisjoint(s.nodes)]
    return Spans(
        atoms=record.atoms,
        ends=sorted({*_list_ends(_list_intervals(record, parts), len(record.atoms)), *record.walls}),
        kept=record.fixed_results | {s.maker for s in kept if s.maker is not None},
        kept_inside=frozenset(s.born for s in kept if s.maker is None and not s.is_small),
    )


def _list_intervals(record: Record, parts: Sequence[set[int]]) -> list[tuple[int, int]]:
    """Return the first and the last atom that save something of each part."""
    saving = [set(part) for part in parts]
    part_of = {atom: number for number, part in enumerate(parts) for atom in part}
    for storage in record.storages:
        if storage.born in part_of:
            saving[part_of[storage.born]] |= storage.saved_by.keys()
    return [(min(atoms), max(atoms)) for atoms in saving]


def _list_ends(intervals: Sequence[tuple[int, int]], count: int) -> list[int]:
    """Return the ends of runs of atoms, of which each has the whole of every interval that begins in it."""
    ends: list[int] = []
    reach = 0
    for first, last in sorted(intervals):
        if first >= reach > 0:
            ends.append(first)
        reach = max(reach, last + 1)
    return [*ends, count]
