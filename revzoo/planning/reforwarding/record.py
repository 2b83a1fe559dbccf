"""What one training step of a captured graph allocates, saves and computes, atom by atom.

The step is run once in FakeTensors with everything kept. From its log of live bytes follows the memory of every plan: in
forward, a tensor that a plan drops lives until its last use; in backward, gradients are the same under every plan, and what
forward has made is freed when the last slot that holds it is.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import finalize

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import GraphModule, Node

from revzoo.analysis.dry_run import find_fake_mode, linear_loss
from revzoo.analysis.flops import FlopCounter
from revzoo.runtime.graph.atoms import Atom, split_into_atoms
from revzoo.runtime.graph.recovery import Slot
from revzoo.runtime.graph.spanned_graph import SMALL, SpannedGraph
from revzoo.runtime.graph.spans import Spans
from revzoo.runtime.live_bytes import LiveBytes, Storages
from revzoo.runtime.nested import map_tensors, tensors_in


@dataclass
class Storage:
    """Memory that forward allocates and backward needs, or that passes between atoms.

    Args:
        bytes: its size.
        born: number of the atom that allocates it.
        maker: the node whose result it is; None for what an atom saves besides its results, such as a mask.
        last_use: number of the last atom that reads it.
        saved_by: numbers of the atoms in which autograd saves it.
        unpacked: when backward first asks for it, as a position in the log of backward; -1 if it never does.
        released: when backward frees it, as a position in the log of backward; -1 if it is not saved.
        is_small: whether it is kept under every plan.
        nodes: all whose results lie in it, views among them.
    """

    bytes: int
    born: int
    maker: Node | None
    last_use: int
    saved_by: set[int] = field(default_factory=set)
    unpacked: int = -1
    released: int = -1
    is_small: bool = False
    nodes: list[Node] = field(default_factory=list)


@dataclass
class Record:
    """One training step of a graph, everything kept.

    Args:
        graph: as captured.
        atoms: of the graph.
        flops: of every atom's forward.
        total_flops: of the whole step.
        inner_bytes: by atom, the peak of what it allocates while it runs.
        storages: what outlives an atom, in order of appearance.
        gradient_bytes: by position in the log of backward, what backward itself has allocated.
        first_unpack: by atom, when backward first asks for something saved in it; -1 if it never does.
        fixed_bytes: parameters, buffers and batch.
        loss_bytes: what loss and backward allocate until backward first asks for something, less what is freed until then of
            results that autograd does not save.
        peak_bytes: of this step.
    """

    graph: GraphModule
    atoms: Sequence[Atom]
    flops: list[int]
    total_flops: int
    inner_bytes: list[int]
    storages: list[Storage]
    gradient_bytes: list[int]
    first_unpack: list[int]
    fixed_bytes: int
    loss_bytes: int
    peak_bytes: int


class _Recorder:
    """The observer that fills a record."""

    def __init__(self, live: LiveBytes, flops: FlopCounter, count: int):
        self.live, self.counter = live, flops
        self.begins, self.ends = [0] * count, [0] * count
        self.flops = [0] * count
        self.made: dict[Node, Storages] = {}
        self.saved: list[tuple[int, Node | None, int, int]] = []  # atom, source, storage, number of the slot
        self.unpacked: dict[int, int] = {}  # by slot: when
        self.released: dict[int, int] = {}
        self._numbers: dict[int, int] = {}  # of live slots, by identity

    def begin(self, atom: int) -> None:
        self.begins[atom] = self.live.now()
        self.flops[atom] = -self.counter.forward

    def end(self, atom: int, saved: Sequence[Slot], made: Mapping[Node, Any]) -> None:
        self.ends[atom] = self.live.now()
        for node, value in made.items():
            self.made[node] = self.live.find(value)
        self.flops[atom] += self.counter.forward
        for slot in saved:
            assert slot.kept is not None
            (storage,) = self.live.find(slot.kept.get())
            number = len(self.saved)
            self.saved.append((atom, slot.source, storage, number))
            self._numbers[id(slot)] = number
            finalize(slot, self._release, id(slot), number)

    def unpack(self, slot: Slot) -> None:
        self.unpacked.setdefault(self._numbers[id(slot)], self.live.now())

    def _release(self, key: int, number: int) -> None:
        self._numbers.pop(key, None)
        self.released[number] = self.live.now()


def record(graph: GraphModule, inputs: Sequence[Any], loss: Callable[[Any], Tensor] = linear_loss) -> Record:
    """Return what a training step of the graph does, without computing it.

    Args:
        graph: as captured.
        inputs: what it was called with; tensors are replaced by FakeTensors, so nothing of them is read or changed.
        loss: computes the loss from what the graph returns.
    """
    mode = require_fake_mode(inputs)
    with mode, torch.enable_grad():
        atoms = split_into_atoms(graph, [make_fake(each, mode) for each in inputs])
        given = [make_fake(each, mode) for each in inputs]
        live, flops = LiveBytes(), FlopCounter()
        recorder = _Recorder(live, flops, len(atoms))
        everything = Spans(atoms, [len(atoms)], frozenset(n for a in atoms for n in a.makes), frozenset(range(len(atoms))))
        program = SpannedGraph(graph, everything, recorder)
        with flops, live:
            fixed = live.watch(given)
            fixed_bytes = live.size(fixed)
            results = program(*given)
            forward_end = live.now()
            result_storages = live.find(results)
            total = loss(results)
            del results
            backward_start = live.now()
            total.backward()
            del total
        return _summarise(graph, atoms, recorder, fixed, fixed_bytes, result_storages, forward_end, backward_start)


def require_fake_mode(inputs: Sequence[Any]) -> FakeTensorMode:
    """Return the mode of the FakeTensors among the inputs, or a new one."""
    mode = find_fake_mode(list(tensors_in(list(inputs))), always=True)
    assert mode is not None
    return mode


def make_fake(value: Any, mode: FakeTensorMode) -> Any:
    """Return the tensors of a value as FakeTensors of their own, so that none has a gradient of an earlier run."""

    def convert(t: Tensor) -> Tensor:
        fake = t.detach() if isinstance(t, FakeTensor) else mode.from_tensor(t.detach())
        return fake.requires_grad_(t.requires_grad)

    return map_tensors(convert, value)


def _summarise(
    graph: GraphModule,
    atoms: Sequence[Atom],
    recorder: _Recorder,
    fixed: Storages,
    fixed_bytes: int,
    results: Storages,
    forward_end: int,
    backward_start: int,
) -> Record:
    live, log = recorder.live, recorder.live.log
    count = len(atoms)
    sizes = {storage: change for storage, change in reversed(log) if change > 0}
    born: dict[int, int] = {}
    inner = [0] * count
    for i, (start, end) in enumerate(zip(recorder.begins, recorder.ends, strict=True)):
        total = 0
        own = set[int]()
        for storage, change in log[start:end]:
            if storage not in born and change > 0:
                born[storage] = i
                own.add(storage)
            if storage in own:
                total += change
                inner[i] = max(inner[i], total)
    storages = _list_storages(atoms, recorder, born, sizes, fixed)
    gradient, total = [], 0
    in_forward = {storage for storage, _ in log[:forward_end]}
    for storage, change in log[forward_end:]:
        if storage not in in_forward:
            total += change
        gradient.append(total)
    first = [-1] * count
    for atom, _, _, number in recorder.saved:
        if number in recorder.unpacked:
            at = recorder.unpacked[number] - forward_end
            first[atom] = at if first[atom] < 0 else min(first[atom], at)
    for each in storages.values():
        each.unpacked -= forward_end if each.unpacked >= 0 else 0
        each.released -= forward_end if each.released >= 0 else 0
    unsaved = {s for s in results if s in storages and not storages[s].saved_by}
    loss, total = 0, 0
    for storage, change in log[forward_end : forward_end + min((at for at in first if at >= 0), default=0)]:
        total += change if storage not in in_forward or storage in unsaved else 0
        loss = max(loss, total)
    return Record(
        graph=graph,
        atoms=atoms,
        flops=recorder.flops,
        total_flops=recorder.counter.forward + recorder.counter.backward,
        inner_bytes=inner,
        storages=list(storages.values()),
        gradient_bytes=gradient or [0],
        first_unpack=first,
        fixed_bytes=fixed_bytes,
        loss_bytes=loss,
        peak_bytes=live.peak(),
    )


def _list_storages(
    atoms: Sequence[Atom], recorder: _Recorder, born: Mapping[int, int], sizes: Mapping[int, int], fixed: Storages
) -> dict[int, Storage]:
    """Return the storages that outlive the atom which allocates them, by their numbers."""
    number = {node: i for i, atom in enumerate(atoms) for node in atom.nodes}
    found: dict[int, Storage] = {}
    for node, own in recorder.made.items():
        last_use = max((number.get(user, len(atoms)) for user in node.users), default=number[node])
        for storage in own - fixed:
            if storage not in found:
                found[storage] = Storage(sizes.get(storage, 0), born.get(storage, number[node]), node, last_use)
            found[storage].nodes.append(node)
            found[storage].last_use = max(found[storage].last_use, last_use)
    for atom, source, storage, slot in recorder.saved:
        if storage in fixed:
            continue
        if storage not in found:
            found[storage] = Storage(sizes.get(storage, 0), born.get(storage, atom), None, atom)
        found[storage].saved_by.add(atom)
        if (at := recorder.unpacked.get(slot, -1)) >= 0:
            found[storage].unpacked = at if found[storage].unpacked < 0 else min(found[storage].unpacked, at)
        found[storage].released = max(found[storage].released, recorder.released.get(slot, -1))
        largest = max((found[s].bytes for node in atoms[atom].makes for s in recorder.made[node] if s in found), default=0)
        found[storage].is_small |= source is None and found[storage].bytes * SMALL <= largest
    return found
