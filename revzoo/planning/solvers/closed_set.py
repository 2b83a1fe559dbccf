"""Closed sets: the parts of a computation graph that can be run again from one vertex to another, and how they divide.

No edge leads from within a closed set to elsewhere. A splittable one is a chain of closed sets between its splitting vertices.
A branched one consists of branches. Any other has a maximal split: the largest closed sets in it. So every graph is a tree of
closed sets, its division tree. Sets of vertices are integers; vertex v is the bit 1 << v.

Where the source contradicts itself, its definitions hold. Algorithm 4 forms a closed set in line 3 if an edge to elsewhere
exists; definition 1, third property, says that none does. Algorithm 4 takes all vertices between two, or none of them;
definition 1 takes the largest set of them that is closed.

Known inefficiencies: a maximal split looks at all pairs of vertices, each in O(n). The 700 vertices of a DenseNet-201 take
seven seconds.

Source: Feng and Huang, "Cutting Down Training Memory by Re-forwarding", section 5.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal

Kind = Literal["edge", "splittable", "branched", "non-branched"]


@dataclass(frozen=True)
class Graph:
    """A computation graph: vertices are tensors, edges say what is computed from what.

    Args:
        costs: of every vertex [bytes], at least 0. Vertices are numbered in an order in which they can be computed.
        edges: pairs (i, j) with i < j: j is computed from i. The first vertex is the only one that is computed from no other,
            the last one the only one that no other is computed from.
    Raises: ValueError: an edge leads nowhere or back, a cost is negative, or there are further first or last vertices.
    """

    costs: tuple[int, ...]
    edges: frozenset[tuple[int, int]]

    def __post_init__(self) -> None:
        count = len(self.costs)
        if not count or min(self.costs) < 0:
            raise ValueError(f"A graph needs vertices with costs of at least 0. Received: {list(self.costs)}.")
        wrong = sorted(edge for edge in self.edges if not 0 <= edge[0] < edge[1] < count)
        if wrong:
            raise ValueError(f"Edges must lead from a vertex to a later one of {count}. Received: {wrong[0]}.")
        for name, missing in (
            ("first", set(range(1, count)) - {j for _, j in self.edges}),
            ("last", set(range(count - 1)) - {i for i, _ in self.edges}),
        ):
            if missing:
                raise ValueError(
                    f"A graph needs one {name} vertex. Vertex {min(missing)} is another: add a vertex of cost 0 with edges "
                    f"{'to' if name == 'first' else 'from'} each of them."
                )

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
