"""What of a captured graph is kept from forward to backward, and how the rest is recovered, span by span."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.fx import Node

from revzoo.errors import RecoveryError
from revzoo.graph.atoms import Atom


@dataclass(frozen=True)
class Nest:
    """Consecutive spans whose starts are not kept, but made again when backward reaches the last of them.

    Args:
        first, end: the spans, as numbers.
        handed: nodes whose results the nest's own recovery hands to its spans.
    """

    first: int
    end: int
    handed: frozenset[Node]


@dataclass(frozen=True)
class Spans:
    """How the activations of a graph are recovered.

    Args:
        atoms: all atoms of the graph, in order.
        ends: of the spans, as numbers of atoms: span i is atoms[ends[i - 1]:ends[i]].
        kept: nodes whose results are kept from forward to backward, if autograd saves them or a recovery starts from them.
        kept_inside: numbers of atoms that also keep whatever else autograd saves in them, such as masks.
        nests: spans that are recovered in two levels.
    """

    atoms: Sequence[Atom]
    ends: Sequence[int]
    kept: frozenset[Node]
    kept_inside: frozenset[int]
    nests: Sequence[Nest] = ()

    @classmethod
    def keep_all(cls, atoms: Sequence[Atom]) -> "Spans":
        """Return one span that keeps everything."""
        return cls(atoms, [len(atoms)], frozenset(node for a in atoms for node in a.makes), frozenset(range(len(atoms))))

    def rename(self, nodes: Mapping[Node, Node]) -> "Spans":
        """Return those of a copy of the graph."""
        nests = [replace(nest, handed=frozenset(map(nodes.__getitem__, nest.handed))) for nest in self.nests]
        return replace(self, kept=frozenset(map(nodes.__getitem__, self.kept)), nests=nests)

    def take(self, numbers: range) -> "Spans":
        """Return those of some consecutive atoms, across whose ends no span goes."""
        first, stop = numbers.start, numbers.stop
        spans = [i for i, end in enumerate(self.ends) if first < end <= stop]
        makes = frozenset(node for atom in self.atoms[first:stop] for node in atom.makes)
        return Spans(
            atoms=self.atoms[first:stop],
            ends=[self.ends[i] - first for i in spans],
            kept=self.kept & makes,
            kept_inside=frozenset(i - first for i in self.kept_inside if i in numbers),
            nests=[
                Nest(nest.first - spans[0], nest.end - spans[0], nest.handed)
                for nest in self.nests
                if spans and spans[0] <= nest.first <= spans[-1]
            ],
        )


@dataclass(frozen=True)
class SpanRecovery:
    """How a span is recovered.

    Args:
        atoms: numbers of those that run again, in order.
        starts: results kept from forward that they start from, or that slots are refilled from.
        inputs: inputs of the graph that they use.
        dead_after: by place in `atoms`: results that no later one and no slot needs.
    """

    atoms: tuple[int, ...]
    starts: tuple[Node, ...]
    inputs: tuple[Node, ...]
    dead_after: tuple[tuple[Node, ...], ...]


def find_recipe(
    spans: Spans, slots: Iterable[tuple[int, int, Node | None, Any]], handed: frozenset[Node] = frozenset()
) -> SpanRecovery:
    """Return how the dropped slots of a span are refilled with the fewest atoms run again.

    Args:
        spans: of the graph.
        slots: atom, place, source and geometry of each.
        handed: what the recovery of the nest hands to this one.
    Raises:
        RecoveryError: an atom that would have to run again changes something else.
    """
    maker = {node: i for i, atom in enumerate(spans.atoms) for node in atom.makes}
    again, starts, inputs = set[int](), dict[Node, None](), dict[Node, None]()
    wanted = [source for _, _, source, _ in slots if source is not None]
    waiting = [i for i, _, source, _ in slots if source is None]
    values = list(dict.fromkeys(wanted))
    while waiting or values:
        while values:
            node = values.pop()
            if node not in maker:
                inputs[node] = None
            elif node in spans.kept or node in handed:
                starts[node] = None
            else:
                waiting.append(maker[node])
        i = waiting.pop() if waiting else None
        if i is not None and i not in again:
            if not spans.atoms[i].is_repeatable:
                raise RecoveryError(
                    f"{spans.atoms[i].name} changes a tensor or setting of others and cannot run again. Call "
                    "revzoo.release(module)."
                )
            again.add(i)
            values += spans.atoms[i].reads
    order = sorted(again)
    last = {node: k for k, i in enumerate(order) for node in (*spans.atoms[i].reads, *spans.atoms[i].makes)}
    refills = set(wanted)
    dead = tuple(tuple(n for n, at in last.items() if at == k and n not in refills) for k in range(len(order)))
    return SpanRecovery(tuple(order), tuple(starts), tuple(inputs), dead)
