"""The calls of a module with a plan: as planned where they are the one that was planned, and stored where they are not.

A plan names the calls of a graph, so that it can be saved, and is checked against the graph it is applied to.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from threading import local
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from revzoo.graph.atoms import Atom
from revzoo.graph.captured_call import Runner, capture_calls, compute_digest
from revzoo.graph.expansion import expand_calls
from revzoo.graph.spanned_graph import SpannedGraph
from revzoo.graph.spans import Nest, Spans
from revzoo.planning.setting import Setting, list_shapes


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


class PlannedCall:
    """What stands in place of a module's call.

    Args:
        module: the one that is called.
        plans: of the calls of captured graphs in a forward, in order.
        setting: what they were made for.
    """

    def __init__(self, module: nn.Module, plans: Sequence[GraphPlan], setting: Setting):
        self._module, self._plans, self._setting = module, plans, setting
        self._captured = capture_calls(module, self._take)
        self._thread = local()
        self._has_warned = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module, setting = self._module, self._setting
        if not torch.is_grad_enabled() or module.training != setting.training:
            return module._call_impl(*args, **kwargs)
        if sorted(list_shapes((args, kwargs))) != sorted(setting.batch):
            self._warn(", not of " + ", ".join(list_shapes((args, kwargs))))
            return module._call_impl(*args, **kwargs)
        self._thread.position = 0
        return self._captured(*args, **kwargs)

    def _take(self, graph: GraphModule, inputs: Sequence[Any]) -> Runner:
        expand_calls(graph)
        digest = compute_digest(graph, inputs)
        programs: dict[int, Runner] = {}

        def run(*given: Any) -> Any:
            at: int = self._thread.position
            self._thread.position = at + 1
            program = programs.get(at)
            if program is None:
                program = programs[at] = self._choose(graph, digest, at)
            return program(*given)

        return run

    def _choose(self, graph: GraphModule, digest: str, at: int) -> Runner:
        """Return what runs a graph as planned. Where a forward leaves out calls, it is the next plan of an equal graph."""
        equal = [place for place, plan in enumerate(self._plans) if plan.digest == digest]
        place = next((place for place in equal if place >= at), equal[-1] if equal else None)
        if place != at and torch.is_grad_enabled():
            self._warn()
        plan = None if place is None else self._plans[place]
        return SpannedGraph(graph, plan.bind(graph)) if plan is not None and plan.ends else graph.forward

    def _warn(self, received: str = "") -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"A call of {self._setting.model} differs from the one that was planned (batch of "
                f"{', '.join(self._setting.batch)}{received}), so it stores what is not in the plan. Plan again for this "
                "batch, or drop the last incomplete batch. With the planned batch, the module or what requires a gradient has "
                "changed since: plan again. Or its forward has taken another branch: plan a part that does not.",
                stacklevel=3,
            )
