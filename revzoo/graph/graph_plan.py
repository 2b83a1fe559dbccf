"""Spans of one graph by the names of its calls, so that a plan can be saved, and checked against the graph it is applied to."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node

from revzoo.graph.atoms import Atom
from revzoo.graph.spans import Nest, Spans


@dataclass(frozen=True)
class GraphPlan:
    """What is kept of a graph, and what is recovered together.

    Args:
        digest: hash of the calls, and of shapes and dtypes of the inputs.
        atoms: names of the calls of every atom.
        drawing: numbers of the atoms that may draw random numbers.
        fixed: numbers of the atoms that may not run again.
        ends: of the spans, as numbers of atoms; none where everything is stored.
        kept: names of the calls whose results are kept.
        kept_inside: numbers of the atoms of which all is kept that autograd saves besides, such as masks.
        nests: of the spans that are recovered in two levels: the first, the one behind the last, and names of the calls whose
            results are handed to them.
    """

    digest: str
    atoms: tuple[tuple[str, ...], ...]
    drawing: tuple[int, ...]
    fixed: tuple[int, ...]
    ends: tuple[int, ...]
    kept: tuple[str, ...]
    kept_inside: tuple[int, ...]
    nests: tuple[tuple[int, int, tuple[str, ...]], ...] = ()

    @classmethod
    def of(cls, digest: str, spans: Spans) -> "GraphPlan":
        """Return the plan that these spans of a graph are."""
        return cls(
            digest=digest,
            atoms=tuple(tuple(node.name for node in atom.nodes) for atom in spans.atoms),
            drawing=tuple(i for i, atom in enumerate(spans.atoms) if atom.draws),
            fixed=tuple(i for i, atom in enumerate(spans.atoms) if not atom.is_repeatable),
            ends=tuple(spans.ends),
            kept=tuple(sorted(node.name for node in spans.kept)),
            kept_inside=tuple(sorted(spans.kept_inside)),
            nests=tuple((nest.first, nest.end, tuple(sorted(node.name for node in nest.handed))) for nest in spans.nests),
        )

    def bind(self, graph: GraphModule) -> Spans:
        """Return the spans of a graph with the same digest."""
        nodes: dict[str, Node] = {node.name: node for node in graph.graph.nodes}
        atoms = [
            Atom.of([nodes[name] for name in names], draws=i in self.drawing, is_repeatable=i not in self.fixed)
            for i, names in enumerate(self.atoms)
        ]
        nests = [Nest(first, end, frozenset(nodes[name] for name in handed)) for first, end, handed in self.nests]
        kept = frozenset(nodes[name] for name in self.kept)
        return Spans(atoms, self.ends, kept, frozenset(self.kept_inside), nests)


def compute_digest(graph: GraphModule, inputs: Sequence[Any]) -> str:
    """Return a hash of a graph's calls with their arguments, and of its inputs' shapes, dtypes and need of gradients."""
    calls = [(node.op, node.name, _describe(node.target), repr(node.args), repr(node.kwargs)) for node in graph.graph.nodes]
    given = [(tuple(t.shape), str(t.dtype), t.requires_grad) if isinstance(t, Tensor) else repr(t) for t in inputs]
    return hashlib.sha256(repr((calls, given)).encode()).hexdigest()


def _describe(target: Any) -> str:
    return target if isinstance(target, str) else getattr(target, "__qualname__", type(target).__name__)
