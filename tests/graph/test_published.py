"""Re-forwarding as published, in the benchmarks: against every split, the paper's examples, and counted on real graphs."""

import copy
import importlib
import json
import math
import random
import subprocess
import sys
from itertools import combinations, pairwise
from pathlib import Path
from types import ModuleType

import pytest
import torch
from timm.models.resnet import Bottleneck, ResNet
from torch import nn

from revzoo.graph.capture import capture
from revzoo.graph.counted_step import count_step
from revzoo.graph.spanned_graph import SpannedGraph
from revzoo.graph.step_record import record

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


@pytest.mark.parametrize("count", [16, 100, 400])
def test_identical_costs_give_segments_of_the_root(published, count):
    """With the first vertex given, `count` vertices are cut in sqrt(count) segments, each with the vertex that ends it."""
    chosen = published.split_graph(published.make_chain([0] + [1] * count))
    root = math.isqrt(count)
    assert chosen.stored == tuple(range(0, count + 1, root))
    assert chosen.cost == 2 * root - 1  # root stored, and root - 1 between each two


def test_the_papers_examples_of_divisions(published):
    """Figure 4: a splittable closed set, one with three branches, and one with neither."""
    chain = published.divide(published.make_chain([1, 1, 1]))
    assert (chain.kind, chain.vertices) == ("splittable", (1,))
    branches = published.divide(published.Graph((1,) * 5, frozenset({(0, 1), (1, 4), (0, 2), (2, 3), (3, 4), (0, 4)})))
    assert branches.kind == "branched"
    assert [tuple(published.list_bits(child.inside)) for child in branches.children] == [(1,), (2, 3)]  # the third is the edge
    # s12, s13, s23, s24 and s34 with a vertex in each; 1, 2, 3, 4 are 0, 2, 5, 7.
    inner = {1: (0, 2), 3: (0, 5), 4: (2, 5), 6: (5, 7)}
    edges = {(a, v) for v, (a, _) in inner.items()} | {(v, b) for v, (_, b) in inner.items()} | {(2, 7)}
    neither = published.divide(published.Graph((1,) * 8, frozenset(edges)))
    assert (neither.kind, neither.vertices) == ("non-branched", (2, 5))
    children = [(child.start, child.end, *published.list_bits(child.inside)) for child in neither.children]
    assert children == [(0, 2, 1), (0, 5, 3), (2, 5, 4), (5, 7, 6)]


def test_equation_1_is_not_the_peak(published):
    """Backward frees what is stored from the end, so only what is stored before a part is there when it is run again."""

    def find_peak(costs, stored):
        return max(sum(costs[v] for v in stored if v <= b) + sum(costs[a + 1 : b]) for a, b in pairwise(stored))

    costs = [1, 1, 1, 1, 2]
    assert published.split_graph(published.make_chain(costs)).stored == (0, 2, 4)
    assert (find_peak(costs, (0, 2, 4)), find_peak(costs, (0, 3, 4))) == (5, 4)


def make_vgg() -> nn.Module:
    layers: list[nn.Module] = []
    for i, (width, out) in enumerate([(3, 8), (8, 8), (8, 16), (16, 16)]):
        layers += [nn.Conv2d(width, out, 3, padding=1), nn.ReLU(inplace=True), *([nn.MaxPool2d(2)] if i % 2 else [])]
    return nn.Sequential(*layers, nn.Flatten(), nn.Dropout(0.5), nn.Linear(16 * 16, 10))


def make_resnet() -> nn.Module:
    return ResNet(Bottleneck, (1, 1, 1, 1), channels=(8, 8, 16, 16), stem_width=8, num_classes=10, drop_path_rate=0.5)


@pytest.mark.parametrize(
    ("make", "size", "stored", "extra_flops", "peaks"),
    [
        (make_vgg, 16, (0, 2, 4, 9), 221_184 + 589_824, (123_384, 109_336)),  # the first and the last convolution again
        (make_resnet, 64, (0, 2, 11, 44), 43_407_872 - 2_560, (2_410_208, 1_886_432)),  # one forward but for the classifier
    ],
)
def test_real_graphs_are_counted_and_run(published, make, size, stored, extra_flops, peaks):
    torch.manual_seed(0)
    module, batch = make().train(), torch.randn(2, 3, size, size)
    with capture(module, batch) as captured:
        step = record(captured)
        spans, chosen = published.choose_as_published(step)
        counted = count_step(captured, spans)
        (call,) = captured.calls
    assert chosen.stored == stored
    assert counted.flops - step.total_flops == extra_flops
    assert (step.peak_bytes, counted.peak_bytes) == peaks
    planned, results = copy.deepcopy(module), []
    torch._dynamo.reset()
    program = SpannedGraph(call.graph, spans.take(call.numbers))
    for run in (module, torch.compile(planned, backend=lambda graph, inputs: program, dynamic=False)):
        torch.manual_seed(1)
        out = run(batch)
        out.square().sum().backward()
        results.append(out)
    assert torch.equal(*results)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(module.parameters(), planned.parameters(), strict=True))


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
