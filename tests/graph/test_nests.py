"""Spans in nests: recovered in two levels, with the gradients, buffers and random numbers of the plain module."""

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from revzoo.graph.atoms import Atom, split_into_atoms
from revzoo.graph.recovery import SpanRecord
from revzoo.graph.spanned_graph import SpannedGraph
from revzoo.graph.spans import Nest, Spans


class _Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 1)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.dropout(self.conv2(self.norm(self.conv1(x)).relu_()))
        y += x
        return torch.cat([y.relu_()[:, :2], x[:, 2:]], 1)


def _find_crossing(atoms: list[Atom], ends: list[int]) -> set[Any]:
    span = {node: next(k for k, end in enumerate(ends) if i < end) for i, atom in enumerate(atoms) for node in atom.nodes}
    reads = ((span[atom.nodes[0]], node) for atom in atoms for node in atom.reads if node in span)
    return {node for reader, node in reads if span[node] != reader}


def _cut(graph: GraphModule, inputs: list[Tensor], length: int, count: int) -> Spans:
    """Return spans of a few atoms each, in nests of a few spans each."""
    atoms = split_into_atoms(graph, inputs)
    ends = [*range(length, len(atoms), length), len(atoms)]
    outer = [*ends[count - 1 : -1 : count], len(atoms)]
    kept, crossing = _find_crossing(atoms, outer), _find_crossing(atoms, ends)
    nests = [Nest(i, min(i + count, len(ends)), frozenset(crossing - kept)) for i in range(0, len(ends), count)]
    return Spans(atoms, ends, frozenset(kept), frozenset(), nests)


def _run(model: nn.Module, call: Callable[[Tensor], Tensor], times: int = 1) -> dict[str, Tensor | None]:
    torch.manual_seed(1)
    x = torch.linspace(-1, 1, 2 * 4 * 6 * 6).view(2, 4, 6, 6).requires_grad_()
    y = call(x)
    for _ in range(times):
        y.square().sum().backward(retain_graph=True)
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return {"y": y.detach(), "x": x.grad, "random": torch.rand(3), **gradients, **dict(model.named_buffers())}


@pytest.mark.parametrize(("length", "count", "times"), [(1, 3, 1), (2, 2, 2), (4, 100, 1)])
def test_gradients_are_those_of_the_plain_module(length: int, count: int, times: int) -> None:
    plain = nn.Sequential(*(_Block(4) for _ in range(3)))
    planned = copy.deepcopy(plain)
    programs = []

    def backend(graph: GraphModule, inputs: list[Tensor]) -> SpannedGraph:
        programs.append(SpannedGraph(graph, _cut(graph, inputs, length, count)))
        return programs[-1]

    torch._dynamo.reset()
    expected = _run(plain, plain, times)
    got = _run(planned, torch.compile(planned, backend=backend), times)
    assert len(programs) == 1
    assert len(programs[0].spans.nests) > 0
    assert any(number < 0 and recipe.atoms for number, recipe in programs[0].recipes.items())
    assert expected.keys() == got.keys()
    assert [name for name, each in expected.items() if not _is_equal(each, got[name])] == []


def _is_equal(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b is None or (a is not None and b is not None and torch.equal(a, b))


def test_a_nest_ends_with_backward() -> None:
    model = nn.Sequential(*(_Block(4) for _ in range(4)))
    torch._dynamo.reset()

    def backend(graph: GraphModule, inputs: list[Tensor]) -> SpannedGraph:
        return SpannedGraph(graph, _cut(graph, inputs, 2, 3))

    gc.collect()
    gc.disable()
    try:
        compiled = torch.compile(model, backend=backend)
        for _ in range(2):
            y = compiled(torch.ones(2, 4, 6, 6)).sum()
            assert len(_find_records()) > 4
            y.backward()
            assert _find_records() == []
    finally:
        gc.enable()


def _find_records() -> list[weakref.ref[Any]]:
    return [weakref.ref(each) for each in gc.get_objects() if type(each) is SpanRecord]
