"""The published plan of a recorded graph, as spans that run like those of any other plan.

The vertices of the published graph are the atoms that allocate something which outlives them, their cost is its size, and edges
are reads. What is computed from inputs alone follows a first vertex of cost 0, and what nothing reads leads to a last one.
"""

from collections.abc import Sequence

from revzoo.graph.spans import Spans
from revzoo.graph.step_record import Record
from revzoo.planning.solvers.closed_set import Graph
from revzoo.planning.solvers.reforwarding import Split, split_graph


def choose_as_published(record: Record) -> tuple[Spans, Split]:
    """Return the spans that Re-forwarding as published chooses, and the split of the graph that they run."""
    graph, makers = make_graph(record)
    chosen = split_graph(graph)
    return make_spans(record, makers, chosen), chosen


def make_graph(record: Record) -> tuple[Graph, list[int]]:
    """Return the graph of a recorded step, and the atom of every vertex but the first and the last."""
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
