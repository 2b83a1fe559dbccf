"""Re-forwarding as published, in the benchmarks: against every split, and its table."""

import importlib
import json
import math
import random
import subprocess
import sys
from itertools import combinations
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def published(monkeypatch) -> ModuleType:
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module("published_reforwarding")


def make_random_graph(published, rng, count, density):
    edges = {(i, j) for i in range(count) for j in range(i + 1, count) if rng.random() < density}
    edges |= {(rng.randrange(j), j) for j in range(1, count) if not any((i, j) in edges for i in range(j))}
    without = [i for i in range(count - 1) if not any((i, j) in edges for j in range(i + 1, count))]
    edges |= {(i, rng.randrange(i + 1, count)) for i in without}
    return published.Graph(tuple(rng.randint(0, 9) for _ in range(count)), frozenset(edges))


def list_splits(published, graph):
    """Yield the splits of all sets of stored vertices that have both ends."""
    last = len(graph.costs) - 1
    for size in range(max(last, 1)):
        for inner in combinations(range(1, last), size):
            yield published.split(graph, sorted({0, last, *inner}))


def is_closed(graph, part):
    """Return whether a part is computed from one stored vertex and used by one other."""
    before = {i for i, j in graph.edges if j in part and i not in part}
    after = {j for i, j in graph.edges if i in part and j not in part}
    return len(before) == len(after) == 1


def test_graphs_equal_every_split_into_closed_sets(published):
    rng = random.Random(1)
    for _ in range(150):
        graph = make_random_graph(published, rng, rng.randint(1, 9), rng.choice([0.1, 0.2, 0.4]))
        chosen = published.split_graph(graph)
        closed = (s for s in list_splits(published, graph) if all(is_closed(graph, part) for part in s.parts))
        assert all(is_closed(graph, part) for part in chosen.parts)
        assert chosen.cost == min(s.cost for s in closed)


@pytest.mark.parametrize("count", [16, 100])
def test_identical_costs_give_segments_of_the_root(published, count):
    """With the first vertex given, `count` vertices are cut in sqrt(count) segments, each with the vertex that ends it."""
    chosen = published.split_graph(published.make_chain([0] + [1] * count))
    root = math.isqrt(count)
    assert chosen.stored == tuple(range(0, count + 1, root))
    assert chosen.cost == 2 * root - 1  # root stored, and root - 1 between each two


@pytest.mark.slow
def test_table_1_is_counted(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", str(FOLDER / "reforwarding.py"), "--quick", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "reforwarding.json").read_text())["table"]
    assert [(row["name"], row["batch"], row["published"]) for row in rows] == [("alexnet", 2, 2620), ("resnet18", 2, 2898)]
    for row in rows:
        assert 0 < row["floor"] <= row["planned"] < row["stored"]
        assert row["planned"] <= row["by_equation_1"]
        assert 1 <= row["flops"] <= 1.34
