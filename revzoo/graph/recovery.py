"""The recovery of the spans of one call of a captured graph, when backward asks for what they have dropped.

Autograd's graph holds a `Slot` in place of every tensor that it saves. The slot of a kept tensor has the tensor. The slot of a
dropped one asks the record of its span: when the first slot asks, the atoms that are needed run again, starting from kept
tensors, and all slots of the span are refilled.

References point one way: autograd's graph holds slots, each slot holds the record of its span, and the record holds the kept
tensors that the recovery starts from. So everything is freed with autograd's graph, and a span's tensors with its last slot.
"""

from collections.abc import Mapping, Sequence
from ctypes import string_at
from dataclasses import dataclass, field
from itertools import groupby
from threading import RLock
from typing import Any, cast
from weakref import ref

import torch
from torch import Tensor
from torch.fx import Node

from revzoo.errors import RecoveryError
from revzoo.graph.atoms import Atom, Calls, name_call
from revzoo.graph.spans import SpanRecovery
from revzoo.runtime.compiling import exclude_from_compilation
from revzoo.runtime.fingerprint import Fingerprint, take_fingerprint
from revzoo.runtime.nested import map_tensors
from revzoo.runtime.random_state import RandomState
from revzoo.runtime.refill_hooks import detach
from revzoo.runtime.round import Round
from revzoo.runtime.settings import Settings
from revzoo.runtime.tripwire import Watch

Geometry = tuple[Sequence[int], Sequence[int], int | torch.SymInt]  # size, strides, offset in the storage
_END_BYTES = 64
_DIFFERENCE = (
    "{} ran differently the second time: what autograd saves in it differs from forward. Have it depend on its inputs, "
    "parameters and torch's random streams alone, not on Python's random, a generator of its own or memory that is read before "
    "it is written (new_empty), or call revzoo.release(module)."
)


class Observer:
    """Hears what atoms do, for those who count it: begin and end, saved tensors that backward asks for, second runs."""

    def begin(self, atom: int) -> None: ...

    def end(self, atom: int, saved: Sequence["Slot"], made: Mapping[Node, Any]) -> None: ...

    def unpack(self, atom: int, slot: "Slot") -> None: ...

    def recover(self, atom: int) -> None: ...


class Kept:
    """A tensor kept for backward, detached so that it holds no graph, with a check that nobody changes it.

    Args:
        tensor: the tensor.
        version: how often it had been changed when backward's value was there; None: as often as now.
    """

    __slots__ = ("__weakref__", "_ends", "_fingerprint", "_tensor", "_version", "requires_grad")

    def __init__(self, tensor: Tensor, version: int | None = None):
        self._tensor = detach(tensor)
        self._version = tensor._version if version is None else version
        self._ends: bytes | None = None
        self._fingerprint: Fingerprint | None = None
        self.requires_grad = tensor.requires_grad

    def mark(self, *, in_full: bool) -> None:
        """Note what shows changes that autograd does not count, as those through `.data`: first and last bytes, or all bits."""
        self._ends = _read_ends(self._tensor)
        if in_full:
            self._fingerprint = take_fingerprint(self._tensor, bits=True)

    def get(self) -> Tensor:
        if self._tensor._version != self._version:
            raise RecoveryError(
                f"A tensor {tuple(self._tensor.shape)} that backward needs was modified in place after forward, or in forward "
                "where the plan does not know it: an input or output of the planned module, or a parameter (optimizer.step "
                "before backward). Replace the in-place operation (x += y, relu_) by x = x + y, or call revzoo.release(module)."
            )
        return self._tensor

    def get_start(self, node: Node) -> Tensor:
        """Return what a recovery starts from, the value of a node, compared with what was noted."""
        tensor = self.get()
        if self._ends is not None and self._ends != _read_ends(tensor):
            raise RecoveryError(_describe_change(node, tensor))
        if self._fingerprint is not None:
            Watch(_describe_change(node, tensor)).compare(node.name, self._fingerprint, tensor, 0.0, of_state=False)
        return tensor


def _read_ends(tensor: Tensor) -> bytes | None:
    """Return the first and last bytes of a tensor in the memory of the host."""
    if type(tensor) is not Tensor or tensor.device.type != "cpu" or not (size := tensor.nbytes) or not tensor.is_contiguous():
        return None
    address, length = tensor.data_ptr(), min(size, _END_BYTES)
    return string_at(address, length) + string_at(address + size - length, length) if address else None


def _describe_change(node: Node, tensor: Tensor) -> str:
    return (
        f"A tensor {tuple(tensor.shape)} that backward needs ({name_call(node)}) was changed after forward where autograd does "
        "not see it, through .data, NumPy or another library. Change inputs, parameters and outputs of the planned module "
        "before its forward or after its backward, or call revzoo.release(module)."
    )


class Slot:
    """What autograd's graph holds in place of a saved tensor.

    Attributes:
        atom: number of the atom in which it was saved.
        source: the node whose result it is, or lies in; None for an input of the graph, or what the atom saves besides.
        is_small: whether it is so much smaller than what the atom reads and makes that it is kept, unless the atom runs again.
        tensor: until the atom has ended.
        writes: how often it had been changed when it was saved.
    """

    __slots__ = "__weakref__", "atom", "geometry", "holder", "is_small", "kept", "place", "record", "source", "tensor", "writes"

    def __init__(self, tensor: Tensor, record: "SpanRecord", atom: int, place: int):
        self.tensor: Tensor | None = tensor
        self.writes = 0 if tensor.is_inference() else tensor._version
        self.record: SpanRecord | None = record
        self.atom = atom
        self.place = place  # among what is saved in the atom
        self.source: Node | None = None
        self.is_small = False
        self.geometry: Geometry | None = None  # in the result of the source
        self.kept: Kept | None = None
        self.holder: Any = None  # of the result of the source, from which recoveries may start

    def keep(self, holder: Any = None) -> None:
        assert self.tensor is not None
        self.kept, self.tensor, self.record, self.holder = Kept(self.tensor, self.writes), None, None, holder

    def drop(self, record: "SpanRecord") -> None:
        """Leave what was kept to the recovery of a span."""
        self.kept, self.record = None, record


class SpanRecord:
    """What one call remembers of one span, or of a nest of spans."""

    def __init__(self, number: int, lock: RLock, shared: "Shared"):
        self.number = number
        self.lock = lock
        self.starts: dict[Node, Kept | Any] = {}
        self.held_by_slots: set[Node] = set()
        self.slots: list[tuple[int, int, Node | None, Any]] = []  # atom, place, source, geometry of every dropped slot
        self.refilled: dict[tuple[int, int], tuple[Tensor, int]] = {}
        self.fingerprint: tuple[tuple[int, int], Fingerprint, float] | None = None  # the last is by how much it may differ
        self.latest: Slot | None = None
        self.shared = shared
        self.nest: SpanRecord | None = None  # in which the span lies
        self.handed: dict[Node, Any] | None = None  # by the nest's recovery, until that of the span
        self.handed_slots: list[tuple[int, int, Node | None, Any]] = []  # those that the nest's recovery refills
        self.inside: list[ref[SpanRecord]] = []  # spans of a nest. They hold the nest's record

    def hand_on(self, env: Mapping[Node, Any]) -> None:
        """Give the spans of a nest what they start from, and refill their slots that its recovery can refill."""
        for each in self.inside:
            if (record := each()) is not None:
                starts = self.shared.recipes[record.number].starts
                record.handed = {node: map_tensors(Kept, env[node]) for node in starts if node in env}
                for i, place, source, geometry in record.handed_slots:
                    record.refilled[i, place] = _take_view(env[cast(Node, source)], geometry)


@dataclass
class Shared:
    """What the recoveries of all spans of one call share.

    Args:
        atoms: of the graph.
        calls: what runs the calls of every atom.
        recipes: by span.
        round: counts that this call's second runs are compared; None if they are not.
        observer: hears what atoms do.
        first: the observer's number of the first atom.
        random: by atom that draws.
        grad_modes, settings: of every atom.
        statistics: running ones, whose values no result depends on.
    """

    atoms: Sequence[Atom]
    calls: Calls
    recipes: Mapping[int, SpanRecovery]
    round: Round | None
    observer: Observer | None
    first: int
    random: dict[int, RandomState] = field(default_factory=dict)
    grad_modes: list[bool] = field(default_factory=list)
    settings: list[Settings] = field(default_factory=list)
    statistics: dict[Node, Tensor] = field(default_factory=dict)


def read_slot_and_tell(slot: Slot, observer: Observer, first: int) -> Tensor:
    """Do as `read_slot`; the observer hears when a call asks for a tensor, and when it goes on after a recovery."""
    observer.unpack(first + slot.atom, slot)
    tensor = read_slot(slot)
    observer.unpack(first + slot.atom, slot)
    return tensor


def read_slot(slot: Slot) -> Tensor:
    """Return the tensor that was saved, recovering the span if it was dropped.

    Raises:
        RecoveryError: it was changed in place, or the atom saves other tensors when it runs again.
    """
    if slot.kept is not None:
        return slot.kept.get()
    record = slot.record
    assert record is not None
    key = (slot.atom, slot.place)
    for _ in range(2):
        tensor, version = record.refilled.pop(key, (None, 0))
        if tensor is not None:
            if tensor._version != version:
                raise RecoveryError(
                    f"An operation changed a tensor {tuple(tensor.shape)} in place that its gradient needs. Call "
                    "revzoo.release(module)."
                )
            return tensor
        _recover(record, key)
    name = record.shared.atoms[slot.atom].name
    raise RecoveryError(f"{name} saved other tensors in this call than in the first. Call revzoo.release(module).")


@exclude_from_compilation
def _recover(record: SpanRecord, key: tuple[int, int] | None = None) -> None:
    """Refill the slots of a span; if it lies in a nest, those that the nest's recovery refills apart from the others."""
    with record.lock:
        if key is not None and key in record.refilled:
            return  # by another thread, since this one looked
        if record.nest is not None:
            is_handed = any(key == slot[:2] for slot in record.handed_slots)
            if is_handed or record.handed is None:
                _recover(record.nest)
            if is_handed:
                return
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                _Recovery(record).run()
        else:
            _Recovery(record).run()


class _Recovery:
    """The second run of one span."""

    def __init__(self, record: SpanRecord):
        self._record = record
        self._shared = record.shared
        self._recipe = record.shared.recipes[record.number]
        self._env: dict[Node, Any] = {node: _restore(node, kept) for node, kept in record.starts.items()}
        self._env |= {node: _restore(node, kept) for node, kept in (record.handed or {}).items()}
        record.handed = None
        # From here on, autograd's graph alone decides how long these live. A later backward through a retained one may free
        # them before it comes here.
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            for node in record.held_by_slots:
                if isinstance(kept := record.starts[node], Kept):
                    record.starts[node] = ref(kept)
        self._atom = self._place = 0  # of what autograd saves next
        self._wanted: set[tuple[int, int]] = {(i, place) for i, place, source, _ in record.slots if source is None}
        self._sources: dict[Node, list[tuple[tuple[int, int], Any]]] = {}
        for i, place, source, geometry in record.slots:
            if source is not None:
                self._sources.setdefault(source, []).append(((i, place), geometry))

    def run(self) -> None:
        for node in list(self._env):
            self._refill_from(node)
        shared = self._shared
        under = groupby(enumerate(self._recipe.atoms), key=lambda at: (id(shared.settings[at[1]]), shared.grad_modes[at[1]]))
        with torch.autograd.graph.saved_tensors_hooks(self._pack, _refuse):
            for (_, grad_mode), atoms in under:
                first = list(atoms)
                settings = shared.settings[first[0][1]]
                entered = settings.enter()
                try:
                    self._run_atoms(first, grad_mode)
                finally:
                    settings.leave(entered)
        self._record.hand_on(self._env)
        self._env.clear()
        self._compare()

    def _run_atoms(self, atoms: Sequence[tuple[int, int]], grad_mode: bool) -> None:
        """Run atoms, given with their places in the recipe."""
        with torch.set_grad_enabled(grad_mode):
            for k, i in atoms:
                random = self._shared.random.get(i)
                states = None if random is None else random.rewind()
                try:
                    self._run_atom(i)
                finally:
                    if random is not None and states is not None:
                        random.restore(states)
                for node in self._recipe.dead_after[k]:
                    self._env.pop(node, None)

    def _run_atom(self, i: int) -> None:
        atom, env = self._shared.atoms[i], self._env
        self._atom, self._place = i, 0
        if self._shared.observer is not None:
            self._shared.observer.recover(self._shared.first + i)
        local = {node: env[node] for node in atom.reads}
        for node in atom.statistics:
            local[node] = self._shared.statistics[node].clone()  # they move once, in forward
        for node, call in self._shared.calls[i]:
            local[node] = call(local)
        for node in atom.makes:
            env[node] = map_tensors(cut, local[node])
        del local
        for node in atom.makes:
            if node in self._sources:
                self._refill_from(node)

    def _pack(self, tensor: Tensor) -> None:
        key = self._atom, self._place
        self._place += 1
        if key in self._wanted:
            self._record.refilled[key] = detach(tensor), tensor._version

    def _refill_from(self, node: Node) -> None:
        for key, geometry in self._sources.pop(node, ()):
            self._record.refilled[key] = _take_view(self._env[node], geometry)

    def _compare(self) -> None:
        """Compare the tensor that was saved last with that of the first run."""
        if self._record.fingerprint is None:
            return
        key, expected, tolerance = self._record.fingerprint
        tensor, _ = self._record.refilled.get(key, (None, 0))
        if tensor is not None:
            name = self._shared.atoms[key[0]].name
            Watch(_DIFFERENCE.format(name)).compare(name, expected, tensor, tolerance, of_state=False)
            if self._shared.round is not None:
                self._shared.round.note_compared()


def cut(tensor: Tensor) -> Tensor:
    """Return a result as a leaf, so that the graph of the atom that has made it is freed."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


def read_geometry(tensor: Tensor) -> Geometry:
    """Return where a tensor lies in its storage."""
    return tensor.size(), tensor.stride(), tensor.storage_offset()


def _take_view(value: Tensor, geometry: tuple[Sequence[int], Sequence[int], int]) -> tuple[Tensor, int]:
    """Return what a slot had saved of a result, and its version."""
    tensor = detach(value)
    if read_geometry(tensor) != geometry:
        with torch.no_grad():
            tensor = tensor.as_strided(*geometry)
    return tensor, tensor._version


def _restore(node: Node, kept: Any) -> Any:
    """Return what was kept of a node's value, as the first run saw it."""

    def restore(each: Any) -> Any:
        if isinstance(each, ref):
            each = each()
            if each is None:
                raise RecoveryError(
                    f"Backward needs the result of {name_call(node)} once more, which an earlier backward has freed. Pass "
                    "retain_graph=True to every backward of this forward but the last, or call revzoo.release(module)."
                )
        if not isinstance(each, Kept):
            return each
        tensor = each.get_start(node)
        return tensor.detach().requires_grad_(each.requires_grad) if each.requires_grad else tensor

    if isinstance(kept, list | tuple):
        return type(kept)(map(restore, kept))
    return restore(kept)


def _refuse(_: None) -> Tensor:
    raise RecoveryError("The planned module differentiates inside its own forward. Call revzoo.release(module).")
