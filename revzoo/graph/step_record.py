"""What one training step of a captured module allocates, saves and computes, atom by atom.

The step is run once, mostly in FakeTensors, with everything kept. The memory of every plan follows from its log of live bytes.
In forward, a tensor that a plan drops lives until its last use. In backward, gradients are the same under every plan, and a
tensor of forward is freed together with the last slot that holds it.

What runs before, between and after the captured graphs counts as atoms that have no calls and may not run again. What they
allocate is kept.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import finalize

from torch.fx import Node

from revzoo.analysis.dry_run import LossFunction
from revzoo.analysis.flops import FlopCounterOfReplacedCalls
from revzoo.graph.atoms import Atom, prepare_inputs
from revzoo.graph.capture import Capture, GraphCall
from revzoo.graph.recovery import Observer, Slot
from revzoo.graph.spanned_graph import SpannedGraph
from revzoo.graph.spans import Spans
from revzoo.runtime.live_bytes import LiveBytesOfReplacedCalls, Storages

_BETWEEN = Atom.of([], changes=[], draws=False, is_repeatable=False)


@dataclass
class Storage:
    """Memory that forward allocates and backward needs, or that passes between atoms.

    Args:
        bytes: its size.
        born: number of the atom that allocates it.
        maker: the node whose result it is; None for what an atom saves besides its results, such as a mask, and for what is
            made between graphs.
        last_use: number of the last atom that reads it (between graphs, of the atom that frees it). It is the number of all
            atoms if it is returned, or saved outside of graphs.
        saved_by: for each atom in which autograd saves it, two positions in the log of backward: where backward first asks
            for the saved tensor (-1: never), and where it is freed.
        unpacked: when backward first asks for it, as a position in the log of backward; -1 if it never does.
        released: when backward frees it, as a position in the log of backward; -1 if forward does.
        is_small: whether it is kept, unless the atom that saves it runs again anyway.
        nodes: all whose results lie in it, views among them.
    """

    bytes: int
    born: int
    maker: Node | None
    last_use: int
    saved_by: dict[int, tuple[int, int]] = field(default_factory=dict)
    unpacked: int = -1
    released: int = -1
    is_small: bool = False
    nodes: list[Node] = field(default_factory=list)


@dataclass
class Record:
    """One training step of a module, everything kept.

    Args:
        atoms: of the whole forward.
        walls: borders of graphs, as numbers of atoms: no span crosses one.
        flops: of every atom's forward.
        total_flops: of the whole step.
        inner_bytes: by atom, the peak of what it allocates while it runs.
        copied_bytes: by atom, running statistics, which a second run moves on copies.
        storages: what outlives an atom, in order of appearance.
        gradient_bytes: by position in the log of backward, what backward itself has allocated.
        first_unpack: by atom, when backward first asks for something saved in it; -1 if it never does.
        fixed_bytes: parameters, buffers and batch.
        left_bytes: what is alive after backward: these, gradients and the loss.
        loss_bytes: what loss and backward allocate until backward first asks for something, less what is freed until then of
            results that autograd does not save.
        peak_bytes: of this step.
    """

    atoms: Sequence[Atom]
    walls: Sequence[int]
    flops: list[int]
    total_flops: int
    inner_bytes: list[int]
    copied_bytes: list[int]
    storages: list[Storage]
    gradient_bytes: list[int]
    first_unpack: list[int]
    fixed_bytes: int
    left_bytes: int
    loss_bytes: int
    peak_bytes: int

    @property
    def fixed_results(self) -> frozenset[Node]:
        """The results of atoms that may not run again, of those that lie in buffers: they take no memory of their own."""
        stored = {node for storage in self.storages for node in storage.nodes}
        return frozenset(node for atom in self.atoms if not atom.is_repeatable for node in atom.makes if node not in stored)


class _Recorder(Observer):
    """Runs captured graphs with everything kept, and notes what happens when."""

    def __init__(self, captured: Capture, live: LiveBytesOfReplacedCalls, flops: FlopCounterOfReplacedCalls):
        self.live, self.counter = live, flops
        self.begins, self.ends = [0] * captured.num_atoms, [0] * captured.num_atoms
        self.flops = [0] * captured.num_atoms
        self.taken: dict[Node, Storages] = {}  # by input of a graph
        self.made: dict[Node, Storages] = {}
        self.saved: list[tuple[int, int, int, bool]] = []  # atom, storage, number of the slot, whether it is small
        self.unpacked: dict[int, int] = {}  # by slot: when
        self.released: dict[int, int] = {}
        self._calls = captured.calls
        self._numbers: dict[int, int] = {}  # of live slots, by identity

    def run_graph(self, at: int, inputs: Sequence[Any]) -> Any:
        """Run a call of a graph; what ran before it since the last one has ended."""
        each = self._calls[at]
        self.ends[each.first - 1] = self.live.now()
        for i in each.numbers:  # for a graph that keeps nothing, because it runs without gradients
            self.begins[i] = self.ends[i] = self.live.now()
        self.taken |= {node: self.live.find(value) for node, value in prepare_inputs(each.graph)(inputs).items()}
        results = SpannedGraph(each.graph, Spans.keep_all(each.atoms), self, each.first)(*inputs)
        self.ends[each.numbers.stop - 1] = self.begins[each.numbers.stop] = self.live.now()
        return results

    def end_forward(self) -> None:
        """Note that forward has ended."""
        self.ends[-1] = self.live.now()

    def begin(self, atom: int) -> None:
        self.begins[atom] = self.live.now()
        self.flops[atom] = -self.counter.forward

    def end(self, atom: int, saved: Sequence[Slot], made: Mapping[Node, Any]) -> None:
        self.ends[atom] = self.live.now()
        self.made |= {node: self.live.find(value) for node, value in made.items()}
        self.flops[atom] += self.counter.forward
        for slot in saved:
            assert slot.kept is not None
            (storage,) = self.live.find(slot.kept.get())
            number = len(self.saved)
            self.saved.append((atom, storage, number, slot.is_small))
            self._numbers[id(slot)] = number
            finalize(slot, self._release, id(slot), number)

    def unpack(self, atom: int, slot: Slot) -> None:
        self.unpacked.setdefault(self._numbers[id(slot)], self.live.now())

    def _release(self, key: int, number: int) -> None:
        self._numbers.pop(key, None)
        self.released[number] = self.live.now()


def record(captured: Capture, loss: LossFunction | None = None, *, with_parameter_gradients: bool = True) -> Record:
    """Return what a training step of a captured module does.

    Args:
        captured: inside its `capture`.
        loss: computes the loss from what the module returns; None is a sum, which keeps nothing for backward.
        with_parameter_gradients: whether they are among the gradients. Published figures leave them out.
    """
    live, flops = LiveBytesOfReplacedCalls(), FlopCounterOfReplacedCalls()
    recorder = _Recorder(captured, live, flops)
    with flops, live:
        fixed = live.watch(captured.tensors)
        fixed_bytes = live.size(fixed)
        recorder.begins[0] = live.now()
        total = captured.run_step(lambda: captured.run(recorder.run_graph), loss, recorder.end_forward)
        left_out = frozenset() if with_parameter_gradients else live.watch([t.grad for t in captured.tensors])
        left_bytes = live.alive()
        del total
    return _summarise(captured.calls, recorder, fixed, fixed_bytes, left_bytes, left_out)


def _summarise(
    calls: Sequence[GraphCall], recorder: _Recorder, fixed: Storages, fixed_bytes: int, left_bytes: int, left_out: Storages
) -> Record:
    atoms = [_BETWEEN, *(atom for each in calls for atom in (*each.atoms, _BETWEEN))]
    live, log = recorder.live, recorder.live.log
    forward_end = recorder.ends[-1]
    inner = [0] * len(atoms)
    born: dict[int, int] = {}
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
    gradient, total = [], 0
    in_forward = {storage for storage, _ in log[:forward_end]}
    for storage, change in log[forward_end:]:
        if storage not in in_forward and storage not in left_out:
            total += change
        gradient.append(total)
    first = [-1] * len(atoms)
    for atom, _, number, _ in recorder.saved:
        first[atom] = find_first((first[atom], recorder.unpacked.get(number, -1) - forward_end))
    storages = _list_storages(atoms, recorder, born, fixed)
    for each in storages.values():
        if not atoms[each.born].nodes and each.released >= 0:  # between graphs nobody hears autograd ask
            first[each.born] = find_first((first[each.born], each.released))
    unsaved = {s for s, each in storages.items() if each.last_use == len(atoms) and not each.saved_by}
    loss, total = 0, 0
    for storage, change in log[forward_end : forward_end + min((at for at in first if at >= 0), default=0)]:
        total += change if storage not in in_forward or storage in unsaved else 0
        loss = max(loss, total)
    return Record(
        atoms=atoms,
        walls=sorted({wall for each in calls for wall in (each.numbers.start, each.numbers.stop)}),
        flops=recorder.flops,
        total_flops=recorder.counter.forward + recorder.counter.backward,
        inner_bytes=inner,
        copied_bytes=[sum(node.meta["example_value"].nbytes for node in atom.statistics) for atom in atoms],
        storages=list(storages.values()),
        gradient_bytes=gradient or [0],
        first_unpack=first,
        fixed_bytes=fixed_bytes,
        left_bytes=left_bytes,
        loss_bytes=loss,
        peak_bytes=live.peak(),
    )


def find_first(positions: Iterable[int]) -> int:
    """Return the first of some positions in a log; -1 stands for none."""
    return min((at for at in positions if at >= 0), default=-1)


def _list_storages(atoms: Sequence[Atom], recorder: _Recorder, born: Mapping[int, int], fixed: Storages) -> dict[int, Storage]:
    """Return by number what outlives the atom that allocates it."""
    log, end, count = recorder.live.log, recorder.ends[-1], len(atoms)
    number = {node: i for i, atom in enumerate(atoms) for node in atom.nodes}
    sizes = {storage: change for storage, change in reversed(log) if change > 0}
    alive, death = dict[int, int](), dict[int, int]()
    for at, (storage, change) in enumerate(log):
        alive[storage] = alive.get(storage, 0) + change
        if not alive[storage]:
            death[storage] = at
    entries: dict[int, Storage] = {}

    def enter(storage: int, atom: int, maker: Node | None) -> Storage:
        if storage not in entries:
            first = born.get(storage, atom)
            is_between = not atoms[first].nodes
            entries[storage] = Storage(sizes.get(storage, 0), first, None if is_between else maker, max(atom, first))
            if is_between:
                leave(storage)
        return entries[storage]

    def leave(storage: int) -> None:
        """Note that code outside of graphs has it, so that the log alone says when it is freed."""
        entry, at = entries[storage], death.get(storage, len(log) - 1)
        if at < end:
            entry.last_use = max(entry.last_use, bisect_right(recorder.begins, at) - 1)
        else:
            entry.last_use = count
            entry.released = max(entry.released, at - end)

    for storage, atom in born.items():
        if not atoms[atom].nodes and death.get(storage, len(log) - 1) >= recorder.ends[atom]:
            enter(storage, atom, None)
    for nodes in (recorder.made, recorder.taken):
        for node, storages in nodes.items():
            for storage in storages - fixed:
                entry = enter(storage, number.get(node, 0), node)
                entry.nodes.append(node)
                entry.last_use = max(entry.last_use, *(number.get(user, 0) for user in node.users), 0)
                if any(user not in number for user in node.users):
                    leave(storage)
    for atom, storage, slot, is_small in recorder.saved:
        if storage not in fixed:
            entry = enter(storage, atom, None)
            asked = max(recorder.unpacked.get(slot, -1) - end, -1)
            released = max(recorder.released.get(slot, -1) - end, -1)
            first, last = entry.saved_by.get(atom, (-1, -1))
            entry.saved_by[atom] = find_first((first, asked)), max(last, released)
            entry.unpacked = find_first((entry.unpacked, asked))
            entry.released = max(entry.released, released)
            entry.is_small |= is_small
    return entries
