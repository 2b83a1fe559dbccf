"""The plan of one captured graph: it names the calls, so that it can be saved, and is bound only to an equal graph."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch.fx import GraphModule, Node

from revzoo.graph.atoms import Atom, list_written
from revzoo.graph.capture import GraphCall
from revzoo.graph.digest import SharedInputs, name_nodes
from revzoo.graph.spans import Nest, Spans


@dataclass(frozen=True)
class GraphPlan:
    """What is kept of a graph, and what is recovered together.

    Args:
        digest: hash of the calls, and of shapes and dtypes of the inputs.
        atoms: names of the calls of every atom.
        drawing: numbers of the atoms that may draw random numbers.
        fixed: numbers of the atoms that may not run again.
        written: names of the inputs that these change.
        shared: names of inputs that lie in one memory, where the graph writes to some of them.
        ends: of the spans, as numbers of atoms; none where everything is stored.
        kept: names of the calls whose results are kept.
        kept_inside: numbers of the atoms that also keep whatever else autograd saves in them, such as masks.
        nests: spans that are recovered in two levels. For each nest: its first span, the one after its last, and the names of
            the calls whose results are handed to its spans.
    """

    digest: str
    atoms: tuple[tuple[str, ...], ...]
    drawing: tuple[int, ...]
    fixed: tuple[int, ...]
    ends: tuple[int, ...]
    kept: tuple[str, ...]
    kept_inside: tuple[int, ...]
    nests: tuple[tuple[int, int, tuple[str, ...]], ...] = ()
    written: tuple[str, ...] = ()
    shared: SharedInputs = ()

    @classmethod
    def of(cls, call: GraphCall, spans: Spans) -> "GraphPlan":
        """Return the plan that these spans of a graph are."""
        names = name_nodes(call.graph.graph)
        return cls(
            digest=call.digest,
            atoms=tuple(list_names(atom, names) for atom in spans.atoms),
            drawing=tuple(i for i, atom in enumerate(spans.atoms) if atom.draws),
            fixed=tuple(i for i, atom in enumerate(spans.atoms) if not atom.is_repeatable),
            ends=tuple(spans.ends),
            kept=tuple(sorted(names[node] for node in spans.kept)),
            kept_inside=tuple(sorted(spans.kept_inside)),
            nests=tuple((nest.first, nest.end, tuple(sorted(names[node] for node in nest.handed))) for nest in spans.nests),
            written=tuple(sorted(names[node] for node in list_written(spans.atoms))),
            shared=call.shared,
        )

    def bind(self, graph: GraphModule) -> Spans:
        """Return the spans of a graph with the same digest."""
        nodes = {name: node for node, name in name_nodes(graph.graph).items()}
        written = [nodes[name] for name in self.written]
        atoms = []
        for i, names in enumerate(self.atoms):
            is_fixed, own = i in self.fixed, [nodes[name] for name in names]
            atoms.append(Atom.of(own, changes=written if is_fixed else (), draws=i in self.drawing, is_repeatable=not is_fixed))
        nests = [Nest(first, end, frozenset(nodes[name] for name in handed)) for first, end, handed in self.nests]
        kept = frozenset(nodes[name] for name in self.kept)
        return Spans(atoms, self.ends, kept, frozenset(self.kept_inside), nests)

    def carry_over(self, atoms: Sequence[Atom], names: Mapping[Node, str]) -> Spans | None:
        """Return spans of another graph, cut and kept where its calls have the same names; None if most have others.

        Its gradients are the same however it is cut. Its peak is near that of the plan, since both have most calls in common.
        """
        own = set(self.atoms)
        place = {each: i for i, atom in enumerate(atoms) if (each := list_names(atom, names)) in own}
        if not self.ends or 2 * len(place) < len(atoms):
            return None
        before = (next((each for each in reversed(self.atoms[:end]) if each in place), None) for end in self.ends)
        ends = {place[each] + 1 for each in before if each is not None}
        kept = {node for atom in atoms for node in atom.makes if names[node] in self.kept or not atom.is_repeatable}
        inside = {place[each] for i in self.kept_inside if (each := self.atoms[i]) in place}
        return Spans(atoms, sorted({*ends, len(atoms)}), frozenset(kept), frozenset(inside))


def list_names(atom: Atom, names: Mapping[Node, str]) -> tuple[str, ...]:
    """Return the names of an atom's calls."""
    return tuple(names[node] for node in atom.nodes)
