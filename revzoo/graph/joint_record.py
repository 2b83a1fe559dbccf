"""What a step does according to its joint graph: the record that the search reads, without running anything.

The log of backward has two positions for each of its operations: where it has made its result, and where what it was the last
to read is freed.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor
from torch.fx import Node

from revzoo.graph.atoms import Atom
from revzoo.graph.joint_graph import JointGraph, count_flops, find_storages
from revzoo.graph.step_record import Record, Storage, find_first

_SMALL = 64  # what is smaller by this factor than what its operation reads is kept with any plan
_HOLDS_TANGENTS = torch.__version__ < "2.14"  # tried with 2.10
_Sources = dict[Node, set[int]]


def record_joint(joint: JointGraph, loss_bytes: int = 0) -> Record:
    """Return what the step of a joint graph does, with everything kept that its backward reads.

    Args:
        joint: the graph.
        loss_bytes: what is allocated between its forward and its backward.
    """
    fixed = {key: size for node in joint.inputs for key, size in find_storages(node)}
    storages, sources = _list_storages(joint, fixed)
    first = _note_uses(joint, storages, sources)
    flops = [sum(map(count_flops, atom.nodes)) for atom in joint.atoms]
    gradients = [*_count_gradients(joint)] or [0]
    inner, fixed_bytes = [0] * len(joint.atoms), sum(fixed.values())
    for storage in storages.values():
        inner[storage.born] += storage.bytes
    named = {key: storage for key, storage in storages.items() if storage.nodes}
    step = Record(
        atoms=[_read_through(atom, sources, named) for atom in joint.atoms],
        walls=[],
        flops=flops,
        total_flops=sum(flops) + sum(map(count_flops, joint.backward)),
        inner_bytes=inner,
        copied_bytes=[0] * len(joint.atoms),
        storages=list(named.values()),
        gradient_bytes=gradients,
        first_unpack=first,
        fixed_bytes=fixed_bytes,
        left_bytes=fixed_bytes + gradients[-1],
        loss_bytes=loss_bytes,
        peak_bytes=0,
    )
    return replace(step, peak_bytes=_count_peak(step))


def _count_peak(step: Record) -> int:
    count, times = len(step.atoms), len(step.gradient_bytes)
    changes = [0] * (count + times + 2)  # of what lives, by atom, at the loss, and by position of backward
    for storage in step.storages:
        changes[storage.born] += storage.bytes
        changes[(count + 1 + storage.released if storage.released >= 0 else storage.last_use) + 1] -= storage.bytes
    others = [*(0 for _ in range(count)), step.loss_bytes, *step.gradient_bytes, 0]
    return step.fixed_bytes + max(map(sum, zip(accumulate(changes), others, strict=True)))


def _list_storages(joint: JointGraph, fixed: Collection[int]) -> tuple[dict[int, Storage], _Sources]:
    """Return what forward allocates, and for each result the storages that it lies in, or is made from where it is fused."""
    storages = dict[int, Storage]()
    sources: _Sources = {node: set() for node in joint.inputs}
    ends = joint.list_ends([atom.nodes[0] for atom in joint.atoms])
    for i, atom in enumerate(joint.atoms):
        read = {key: size for each in atom.nodes[0].all_input_nodes for key, size in find_storages(each)}
        for node in atom.nodes:
            given = {key for each in node.all_input_nodes for key in sources.get(each, ())}
            for key in given:
                storages[key].last_use = max(storages[key].last_use, ends[i])
            sources[node] = given if node in joint.fused else set()
            for key, size in () if node in joint.fused else find_storages(node):
                if key not in fixed:
                    is_kept = not atom.is_repeatable or size * _SMALL <= sum(read.values())
                    storage = storages.setdefault(key, Storage(size, i, None, i, is_small=is_kept))
                    if isinstance(node.meta["val"], Tensor):  # one of several results, not their tuple
                        storage.maker = storage.maker or node
                        storage.nodes.append(node)
                        sources[node].add(key)
    for key in {key for node in joint.returned for key in sources.get(node, ())}:
        storages[key].last_use = len(joint.atoms)
    return storages, sources


def _note_uses(joint: JointGraph, storages: Mapping[int, Storage], sources: _Sources) -> list[int]:
    """Note when backward reads what; return for each atom when its backward first does."""
    first = [-1] * len(joint.atoms)
    fused: dict[Node, set[tuple[int, int]]] = {}  # what results of backward are made from, and for which atom
    views: dict[Node, set[int]] = {}  # by result of backward: what of forward it is a view of
    owners, ends = joint.list_owners(), joint.list_ends(joint.backward)
    for at, node in enumerate(joint.backward):
        reads = {(key, owners[at]) for each in node.all_input_nodes for key in sources.get(each, views.get(each, ()))}
        reads = reads.union(*(fused.get(each, ()) for each in node.all_input_nodes))
        if node in joint.fused:
            fused[node] = reads
        else:
            views[node] = {key for key, _ in find_storages(node)}.intersection(storages)
        for key, owner in reads:
            storage, now, end = storages[key], 2 * at, 2 * ends[at]
            asked, _ = storage.saved_by.get(owner, (now, end))
            storage.saved_by[owner] = asked, end
            storage.unpacked = find_first((storage.unpacked, now))
            storage.released = max(storage.released, end)
            first[owner] = find_first((first[owner], now))
    return first


def _read_through(atom: Atom, sources: _Sources, storages: Mapping[int, Storage]) -> Atom:
    """Return an atom that reads what fused results are made from. One that cannot run again has no reason to: it is kept."""
    reads = (storages[key].nodes[0] for each in atom.reads for key in sorted(sources.get(each, ())))
    return replace(atom, reads=tuple(dict.fromkeys(reads)), is_repeatable=True)


def _count_gradients(joint: JointGraph) -> Iterator[int]:
    """Yield the bytes of what backward has allocated, at every position of its log.

    Before PyTorch 2.14 autograd holds what backward starts from until all of it has run, unless that is a loss.
    """
    forward = [*joint.inputs, *(node for atom in joint.atoms for node in atom.nodes)]
    known = {key for node in forward for key, _ in find_storages(node)}
    own = {node: dict(find_storages(node)) for node in joint.tangents}  # by result: the storages that it is made from
    last, ends = dict[int, int](), joint.list_ends(joint.backward)
    alive = {key: size for sizes in own.values() for key, size in sizes.items()}
    for at, node in enumerate(joint.backward):
        given = {key: size for each in node.all_input_nodes for key, size in own.get(each, {}).items()}
        made = {key: size for key, size in find_storages(node) if key not in known}
        own[node] = given if node in joint.fused else made
        last |= dict.fromkeys((*given, *own[node]), ends[at])
    if _HOLDS_TANGENTS and all(node.meta["val"].dim() for node in joint.tangents):
        last |= dict.fromkeys(alive, len(joint.backward) - 1)
    for key in {key for node in joint.gradients for key, _ in find_storages(node)}:
        last.pop(key, None)  # it stays
    dying: dict[int, list[int]] = {}
    for key, at in last.items():
        dying.setdefault(at, []).append(key)
    total = sum(alive.values())
    for at, node in enumerate(joint.backward):
        for key, size in own[node].items():
            total += 0 if key in alive else size
            alive.setdefault(key, size)
        yield total
        total -= sum(alive[key] for key in dying.get(at, ()))
        yield total
