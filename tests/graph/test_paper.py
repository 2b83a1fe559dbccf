"""Re-forwarding as published: against every set of stored vertices, its examples, and where it is no optimum."""

import math
import random
from itertools import combinations, pairwise

import pytest

from revzoo.planning.solvers.closed_set import Graph, divide, list_bits, make_chain
from revzoo.planning.solvers.reforwarding import Split, split, split_chain, split_graph


def make_graph(rng: random.Random, count: int, density: float = 0.3) -> Graph:
    edges = {(i, j) for i in range(count) for j in range(i + 1, count) if rng.random() < density}
    edges |= {(rng.randrange(j), j) for j in range(1, count) if not any((i, j) in edges for i in range(j))}
    without = [i for i in range(count - 1) if not any((i, j) in edges for j in range(i + 1, count))]
    edges |= {(i, rng.randrange(i + 1, count)) for i in without}
    return Graph(tuple(rng.randint(0, 9) for _ in range(count)), frozenset(edges))


def list_splits(graph: Graph):
    """Yield the splits of all sets of stored vertices that have both ends."""
    last = len(graph.costs) - 1
    ends = sorted({0, last})
    for size in range(max(last, 1)):
        for inner in combinations(range(1, last), size):
            yield split(graph, sorted([*ends, *inner]))


def is_closed(graph: Graph, part: tuple[int, ...]) -> bool:
    """Return whether a part is computed from one stored vertex and used by one other."""
    before = {i for i, j in graph.edges if j in part and i not in part}
    after = {j for i, j in graph.edges if i in part and j not in part}
    return len(before) == len(after) == 1


def find_closed(graph: Graph) -> int:
    return min(s.cost for s in list_splits(graph) if all(is_closed(graph, part) for part in s.parts))


RESIDUAL = Graph((2, 2, 8, 3, 8), frozenset({(0, 1), (0, 3), (1, 2), (2, 3), (3, 4)}))
NO_CLOSED_SET = Graph((1, 2, 3, 4, 5), frozenset({(0, 1), (0, 2), (0, 3), (1, 2), (1, 4), (2, 3), (3, 4)}))


def test_equation_1_by_hand():
    assert split(RESIDUAL, [0, 2, 4]) == Split((0, 2, 4), ((1,), (3,)), 18, 3)
    assert split(RESIDUAL, [0, 4]) == Split((0, 4), ((1, 2, 3),), 10, 13)
    assert split(make_chain([1, 2, 3, 4]), [3, 0, 1]) == Split((0, 1, 3), ((2,),), 7, 3)


def test_chains_equal_every_stored_set():
    rng = random.Random(0)
    for _ in range(60):
        costs = [rng.randint(0, 9) for _ in range(rng.randint(1, 10))]
        found = split_chain(costs)
        assert found == split(make_chain(costs), found.stored)
        assert found.cost == min(s.cost for s in list_splits(make_chain(costs)))
        assert split_graph(make_chain(costs)).cost == found.cost


def test_graphs_equal_every_split_into_closed_sets():
    rng = random.Random(1)
    kinds = set()
    for _ in range(150):
        graph = make_graph(rng, rng.randint(1, 9), rng.choice([0.1, 0.2, 0.4]))
        found = split_graph(graph)
        assert all(is_closed(graph, part) for part in found.parts)
        assert found.cost == find_closed(graph)
        if len(graph.costs) > 1:
            waiting = [divide(graph)]
            while waiting:
                node = waiting.pop()
                kinds.add(node.kind)
                below = [v for child in node.children for v in list_bits(child.inside)]
                assert sorted([*below, *node.vertices]) == list(list_bits(node.inside)) or node.kind == "edge"
                waiting += node.children
    assert kinds == {"edge", "splittable", "branched", "non-branched"}


@pytest.mark.slow
def test_more_graphs_equal_every_split_into_closed_sets():
    rng = random.Random(2)
    for _ in range(300):
        graph = make_graph(rng, rng.randint(8, 12), rng.choice([0.05, 0.1, 0.2, 0.3]))
        assert split_graph(graph).cost == find_closed(graph)


@pytest.mark.parametrize("count", [16, 25, 100, 400])
def test_identical_costs_give_segments_of_the_root(count):
    """With the first vertex given, `count` vertices are cut in sqrt(count) segments, each with the vertex that ends it."""
    found = split_chain([0] + [1] * count)
    root = math.isqrt(count)
    assert found.stored == tuple(range(0, count + 1, root))
    assert found.cost == 2 * root - 1  # root stored, and root - 1 between each two


def test_long_chains_are_quick():
    rng = random.Random(3)
    costs = [rng.randint(10**6, 10**9) for _ in range(200)]
    found = split_chain(costs)
    assert found == split(make_chain(costs), found.stored)
    moved = [split(make_chain(costs), sorted({*found.stored} ^ {v})) for v in range(1, 199)]
    assert all(found.cost <= other.cost for other in moved)


def test_the_papers_examples_of_divisions():
    """Figure 4: a splittable closed set, one with three branches, and one with neither."""
    chain = divide(make_chain([1, 1, 1]))
    assert (chain.kind, chain.vertices) == ("splittable", (1,))
    assert [(child.start, child.end, child.kind) for child in chain.children] == [(0, 1, "edge"), (1, 2, "edge")]

    branches = divide(Graph((1,) * 5, frozenset({(0, 1), (1, 4), (0, 2), (2, 3), (3, 4), (0, 4)})))
    assert branches.kind == "branched"
    assert [tuple(list_bits(child.inside)) for child in branches.children] == [(1,), (2, 3)]  # the third is the edge

    # s12, s13, s23, s24 and s34 with a vertex in each; 1, 2, 3, 4 are 0, 2, 5, 7.
    inner = {1: (0, 2), 3: (0, 5), 4: (2, 5), 6: (5, 7)}
    edges = {(a, v) for v, (a, _) in inner.items()} | {(v, b) for v, (_, b) in inner.items()} | {(2, 7)}
    neither = divide(Graph((1,) * 8, frozenset(edges)))
    assert (neither.kind, neither.vertices) == ("non-branched", (2, 5))
    assert [(child.start, child.end, tuple(list_bits(child.inside))) for child in neither.children] == [
        (0, 2, (1,)),
        (0, 5, (3,)),
        (2, 5, (4,)),
        (5, 7, (6,)),
    ]


def test_an_edge_beside_the_rest_is_a_branch():
    shortcut = divide(Graph((1, 1, 1), frozenset({(0, 1), (1, 2), (0, 2)})))
    assert shortcut.kind == "branched"
    assert [(child.kind, child.vertices) for child in shortcut.children] == [("splittable", (1,))]


def test_a_closed_set_beside_one_that_is_open():
    """Between 0 and 3 lie 1 and 2, of which 2 is used elsewhere: by definition 1, vertex 1 alone is a closed set."""
    graph = Graph((1, 7, 2, 2, 2, 1), frozenset({(0, 1), (1, 3), (0, 2), (2, 3), (2, 4), (0, 4), (3, 5), (4, 5), (3, 4)}))
    root = divide(graph)
    assert [tuple(list_bits(child.inside)) for child in root.children] == [(1,)]
    found = split_graph(graph)
    assert found.cost == find_closed(graph) == 15


def test_additions_of_stored_tensors_are_not_dropped():
    """The smallest residual block at which the published optimum is none: its addition has two stored inputs."""
    assert split_graph(RESIDUAL).cost == 23
    assert min(s.cost for s in list_splits(RESIDUAL)) == split(RESIDUAL, [0, 2, 4]).cost == 21


def test_graphs_without_closed_sets_store_all_or_nothing():
    root = divide(NO_CLOSED_SET)
    assert (root.kind, root.children, root.vertices) == ("non-branched", (), (1, 2, 3))
    assert split_graph(NO_CLOSED_SET) == Split((0, 4), ((1, 2, 3),), 6, 9)


def test_equation_1_is_not_the_peak():
    """Backward frees what is stored from the end, so only what is stored before a part is there when it is run again."""

    def find_peak(costs, stored):
        return max(sum(costs[v] for v in stored if v <= b) + sum(costs[a + 1 : b]) for a, b in pairwise(stored))

    costs = [1, 1, 1, 1, 2]
    assert split_chain(costs).stored == (0, 2, 4)
    assert [s.stored for s in list_splits(make_chain(costs)) if s.cost <= 5] == [(0, 2, 4)]
    assert (find_peak(costs, (0, 2, 4)), find_peak(costs, (0, 3, 4))) == (5, 4)


@pytest.mark.parametrize("costs", [[5], [5, 7], [0, 0, 0]])
def test_degenerate_graphs(costs):
    ends = tuple(sorted({0, len(costs) - 1}))
    for found in (split_chain(costs), split_graph(make_chain(costs))):
        assert (set(ends) <= set(found.stored), found.cost) == (True, sum(costs))


@pytest.mark.parametrize(
    ("costs", "edges", "message"),
    [
        ((), (), "needs vertices with costs of at least 0. Received: \\[\\]"),
        ((1, -1), ((0, 1),), "at least 0. Received: \\[1, -1\\]"),
        ((1, 1), ((1, 0),), "from a vertex to a later one of 2. Received: \\(1, 0\\)"),
        ((1, 1), ((0, 2),), "later one of 2. Received: \\(0, 2\\)"),
        ((1, 1, 1), ((0, 2), (1, 2)), "needs one first vertex. Vertex 1 is another: add a vertex of cost 0 with edges to"),
        ((1, 1, 1), ((0, 1), (0, 2)), "needs one last vertex. Vertex 1 is another: add a vertex of cost 0 with edges from"),
    ],
)
def test_wrong_graphs_are_refused(costs, edges, message):
    with pytest.raises(ValueError, match=message):
        Graph(costs, frozenset(edges))
