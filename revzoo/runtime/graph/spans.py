"""Running a captured graph so that backward recovers what it needs span by span.

The calls of the graph run as ordinary autograd code under `saved_tensors_hooks`. Of what autograd saves, the pack hook keeps
parameters, inputs of the graph and what the plan names; it drops the rest and leaves a `Slot`. Unpacking the first dropped slot
of a span in backward recovers the whole span: the atoms that are needed run again, from what was kept, and refill its slots.

References point one way: autograd's graph holds slots, a slot its span's record, and that the kept tensors which the recovery
starts from. So everything is freed with autograd's graph, a span's tensors with the last of its slots.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from threading import RLock
from typing import Any, Protocol, cast
from weakref import ref

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from revzoo.errors import RecoveryError
from revzoo.runtime.compiling import exclude_from_compilation
from revzoo.runtime.graph.atoms import Atom, bind_inputs, find_last_uses, prepare_call
from revzoo.runtime.nested import map_tensors, tensors_in
from revzoo.runtime.random_state import RandomState
from revzoo.runtime.refill_hooks import detach
from revzoo.runtime.settings import Settings
from revzoo.runtime.transforms import must_store, refuse_to_drop
from revzoo.runtime.tripwire import Fingerprint, Watch, is_watching, judge_arrived, send_comparisons, take_fingerprint

Geometry = tuple[Sequence[int], Sequence[int], int | torch.SymInt]  # size, strides, offset in the storage
_Kind = tuple[torch.dtype, bool, bool]  # dtype, whether it is a conjugate or negative view
SMALL = 64  # what an atom saves besides its inputs and results is kept where it is so many times smaller than they are
_LARGEST_DIFFERENCE = 1e-2


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
        kept_inside: numbers of atoms of which everything else that autograd saves in them is kept too, such as masks.
        nests: spans that are recovered in two levels.
    """

    atoms: Sequence[Atom]
    ends: Sequence[int]
    kept: frozenset[Node]
    kept_inside: frozenset[int]
    nests: Sequence[Nest] = ()


class Observer(Protocol):
    """Hears what a run of a graph does, for those who count it."""

    def begin(self, atom: int) -> None: ...

    def end(self, atom: int, saved: Sequence["Slot"], made: Mapping[Node, Any]) -> None: ...

    def unpack(self, slot: "Slot") -> None: ...


class SpannedGraph:
    """A captured graph whose calls keep what a plan names, callable as the graph is.

    Args:
        graph: as captured.
        spans: what is kept, and what is recovered together.
        observer: hears what happens.
    """

    def __init__(self, graph: GraphModule, spans: Spans, observer: Observer | None = None):
        self.graph = graph
        self.spans = spans
        self.observer = observer
        self.recipes: dict[int, Recipe] = {}  # by span, from the first call on
        self.calls = [[(node, prepare_call(graph, node)) for node in atom.nodes] for atom in spans.atoms]
        last = find_last_uses(graph)
        self._output = next(node for node in graph.graph.nodes if node.op == "output")
        number = {node: i for i, atom in enumerate(spans.atoms) for node in atom.nodes}
        self.dead_after: list[list[Node]] = [[] for _ in spans.atoms]  # results that no later atom uses
        for node, user in last.items():
            if user in number and node in number:
                self.dead_after[number[user]].append(node)
        for node, i in number.items():
            if node not in last:
                self.dead_after[i].append(node)

    @exclude_from_compilation
    def __call__(self, *inputs: Any) -> Any:
        if not torch.is_grad_enabled() or must_store():
            return self.graph.forward(*inputs)
        refuse_to_drop("the planned module")
        send_comparisons()
        judge_arrived()
        return _Run(self, inputs).forward(self._output)


@dataclass(frozen=True)
class Recipe:
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


class _Kept:
    """A tensor kept for backward, detached so that it holds no graph, with a check that nobody changes it in place."""

    __slots__ = ("__weakref__", "_tensor", "_version", "requires_grad")

    def __init__(self, tensor: Tensor):
        self._tensor = detach(tensor)
        self._version = tensor._version
        self.requires_grad = tensor.requires_grad

    def get(self) -> Tensor:
        if self._tensor._version != self._version:
            raise RecoveryError(
                f"A tensor {tuple(self._tensor.shape)} that backward needs was modified in place after forward: an input or "
                "output of the planned module, or a parameter (optimizer.step before backward). Replace the in-place operation "
                "(x += y, relu_) by x = x + y, or call revzoo.release(module)."
            )
        return self._tensor


class Slot:
    """What autograd's graph holds in place of a saved tensor.

    Attributes:
        atom: number of the atom in which it was saved.
        source: the node whose result it is, or lies in; None for an input of the graph, or what the atom saves besides.
        tensor: until the atom has ended.
    """

    __slots__ = ("__weakref__", "atom", "geometry", "holder", "kept", "place", "record", "source", "tensor")

    def __init__(self, tensor: Tensor, record: "_Record", atom: int, place: int):
        self.tensor: Tensor | None = tensor
        self.record: _Record | None = record
        self.atom = atom
        self.place = place  # among what is saved in the atom
        self.source: Node | None = None
        self.geometry: Geometry | None = None  # in the result of the source
        self.kept: _Kept | None = None
        self.holder: Any = None  # of the result of the source, from which recoveries may start

    def keep(self, holder: Any = None) -> None:
        assert self.tensor is not None
        self.kept, self.tensor, self.record, self.holder = _Kept(self.tensor), None, None, holder


class _Record:
    """What one call remembers of one span, or of a nest of spans."""

    def __init__(self, number: int, run: "_Run"):
        self.number = number
        self.lock = run.lock
        self.starts: dict[Node, _Kept | Any] = {}
        self.held_by_slots: set[Node] = set()
        self.slots: list[tuple[int, int, Node | None, Any]] = []  # atom, place, source, geometry of every dropped slot
        self.refilled: dict[tuple[int, int], tuple[Tensor, int]] = {}
        self.fingerprint: tuple[tuple[int, int], Fingerprint] | None = None
        self.latest: Slot | None = None
        self.shared = run.shared
        self.nest: _Record | None = None  # in which the span lies
        self.handed: dict[Node, Any] | None = None  # by the nest's recovery, until that of the span
        self.handed_slots: list[tuple[int, int, Node | None, Any]] = []  # those that the nest's recovery refills
        self.inside: list[ref[_Record]] = []  # spans of a nest. They hold the nest's record

    def hand_on(self, env: Mapping[Node, Any]) -> None:
        """Give the spans of a nest what they start from, and refill their slots that its recovery can refill."""
        for each in self.inside:
            if (record := each()) is not None:
                starts = self.shared.program.recipes[record.number].starts
                record.handed = {node: map_tensors(_Kept, env[node]) for node in starts if node in env}
                for i, place, source, geometry in record.handed_slots:
                    record.refilled[i, place] = _take_view(env[cast(Node, source)], geometry)


class _Shared:
    """What the recoveries of all spans of one call share."""

    def __init__(self, program: SpannedGraph):
        self.program = program
        self.random: dict[int, RandomState] = {}
        self.grad_modes: list[bool] = []
        self.settings: list[Settings] = []
        self.statistics: dict[Node, Tensor] = {}  # whose values no result depends on


class _Packed:
    """What autograd saves in one atom. The hooks live as long as autograd's graph, so they hold this and no more."""

    def __init__(self) -> None:
        self.atom = 0
        self.record: _Record | None = None
        self._slots: list[Slot] = []

    def pack(self, tensor: Tensor) -> Slot:
        assert self.record is not None
        slot = Slot(tensor, self.record, self.atom, len(self._slots))
        self._slots.append(slot)
        return slot

    def take(self) -> list[Slot]:
        slots, self._slots, self.record = self._slots, [], None
        return slots


class _Run:
    """One call of a graph."""

    def __init__(self, program: SpannedGraph, inputs: Sequence[Any]):
        self._program = program
        self._env: dict[Node, Any] = dict(bind_inputs(program.graph, inputs))
        self._inputs = dict(self._env)
        self.lock = RLock()
        self.shared = _Shared(program)
        self._held: dict[Node, Any] = {}
        self._held_by_slots = set[Node]()  # those that live as long as a slot in autograd's graph
        self._makers = _Makers()
        for node, value in self._env.items():
            self._makers.note(value, node)
        self._packed = _Packed()
        self._unpack = _unpack if program.observer is None else partial(_unpack, observer=program.observer)

    def forward(self, output: Node) -> Any:
        spans = self._program.spans
        records = [_Record(i, self) for i in range(len(spans.ends))]
        devices = {t.device for t in tensors_in(list(self._inputs.values()))}
        device = next((d for d in devices if d.type != "cpu"), torch.device("cpu"))
        settings = Settings(device)
        start = 0
        with torch.autograd.graph.saved_tensors_hooks(self._packed.pack, self._unpack):
            for record, end in zip(records, spans.ends, strict=True):
                for i in range(start, end):
                    self.shared.settings.append(settings)
                    self.shared.grad_modes.append(torch.is_grad_enabled())
                    self._run_atom(i, record)
                    if not spans.atoms[i].is_repeatable:
                        settings = Settings(device)  # it may have entered autocast
                start = end
        nest_of = {i: (number, nest) for number, nest in enumerate(spans.nests) for i in range(nest.first, nest.end)}
        nests = [_Record(-1 - number, self) for number in range(len(spans.nests))]
        for i, record in enumerate(records):
            number, nest = nest_of.get(i, (0, None))
            self._prepare(record, frozenset() if nest is None else nest.handed)
            if nest is not None and (record.slots or record.handed_slots):
                record.nest = nests[number]
                nests[number].inside.append(ref(record))
        for number, nest in enumerate(spans.nests):
            self._prepare_nest(nests[number], nest)
        (results,) = output.args
        return torch.fx.node.map_arg(results, self._env.__getitem__)

    def _run_atom(self, i: int, record: _Record) -> None:
        program, env = self._program, self._env
        atom = program.spans.atoms[i]
        if program.observer is not None:
            program.observer.begin(i)
        random = None
        if atom.draws:
            random = RandomState({t.device for each in atom.reads for t in tensors_in(env[each])})
        self._packed.atom, self._packed.record = i, record
        for node, call in program.calls[i]:
            env[node] = call(env)
        if random is not None:
            random.end_first_run()
            self.shared.random[i] = random
        for node in atom.statistics:
            self.shared.statistics[node] = detach(env[node])
        self._settle(i, record)
        for node in program.dead_after[i]:
            del env[node]

    def _settle(self, i: int, record: _Record) -> None:
        """Decide what becomes of all that was saved in atom i, whose results are known now."""
        program = self._program
        spans, env, makers = program.spans, self._env, self._makers
        atom = spans.atoms[i]
        for node in atom.makes:
            value = env[node]
            if node in spans.kept:
                self._held[node] = map_tensors(_Kept, value)
            if isinstance(value, Tensor):
                makers.note(value, node)
        saved = self._packed.take()
        for slot in saved:
            tensor = slot.tensor
            assert tensor is not None
            maker = makers.find(tensor)
            is_input = maker in self._inputs
            slot.source = None if is_input or not makers.can_lie_in(tensor) else maker
            if (
                is_input
                or not atom.is_repeatable
                or maker in spans.kept
                or (slot.source is None and (i in spans.kept_inside or self._is_small(tensor, atom)))
            ):
                holder = None if is_input or maker is None else self._held.get(maker)
                slot.keep(holder)
                if maker is not None and isinstance(holder, _Kept):
                    self._held_by_slots.add(maker)
                continue
            if slot.source is not None:
                slot.geometry = _read_geometry(tensor)
            record.slots.append((i, slot.place, slot.source, slot.geometry))
            record.latest = slot
        latest = record.latest
        if latest is not None and latest.tensor is not None and is_watching():
            taken = take_fingerprint(latest.tensor)
            record.fingerprint = None if taken is None else ((latest.atom, latest.place), taken)
        if program.observer is not None:
            program.observer.end(i, saved, {node: env[node] for node in atom.makes})
        for slot in saved:
            slot.tensor = None

    def _is_small(self, tensor: Tensor, atom: Atom) -> bool:
        around = (t for node in (*atom.makes, *atom.reads) for t in tensors_in(self._env[node]))
        return tensor.untyped_storage().nbytes() * SMALL <= max((t.nbytes for t in around), default=0)

    def _prepare(self, record: _Record, handed: frozenset[Node]) -> None:
        """Give a span what its recovery starts from.

        Args:
            record: of the span.
            handed: what the nest's recovery makes.
        """
        record.handed_slots = [slot for slot in record.slots if slot[2] in handed]
        record.slots = [slot for slot in record.slots if slot[2] not in handed]
        record.latest = None  # a slot holds its record
        recipe = self._program.recipes.get(record.number)
        if recipe is None:
            recipe = self._program.recipes[record.number] = find_recipe(self._program.spans, record.slots, handed)
        if record.slots:
            self._hold_starts(record, recipe, handed)

    def _prepare_nest(self, record: _Record, nest: Nest) -> None:
        """Give a nest what its own recovery starts from."""
        recipes, spans = self._program.recipes, self._program.spans
        recipe = recipes.get(record.number)
        if recipe is None:
            inside = [each for link in record.inside if (each := link()) is not None]
            starts = (node for each in inside for node in recipes[each.number].starts if node in nest.handed)
            refilled = (source for each in inside for _, _, source, _ in each.handed_slots)
            wanted = dict.fromkeys([*starts, *refilled])
            recipe = recipes[record.number] = find_recipe(spans, [(0, 0, node, None) for node in wanted])
        self._hold_starts(record, recipe)

    def _hold_starts(self, record: _Record, recipe: Recipe, handed: frozenset[Node] = frozenset()) -> None:
        record.starts = {node: self._held[node] for node in recipe.starts if node not in handed}
        record.held_by_slots = self._held_by_slots.intersection(record.starts)
        record.starts |= {node: map_tensors(_Kept, self._inputs[node]) for node in recipe.inputs}


def find_recipe(
    spans: Spans, slots: Iterable[tuple[int, int, Node | None, Any]], handed: frozenset[Node] = frozenset()
) -> Recipe:
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
                raise RecoveryError(f"{spans.atoms[i].name} changes a tensor or setting of others and cannot run again.")
            again.add(i)
            values += spans.atoms[i].reads
    order = sorted(again)
    last = {node: k for k, i in enumerate(order) for node in (*spans.atoms[i].reads, *spans.atoms[i].makes)}
    refills = set(wanted)
    dead = tuple(tuple(n for n, at in last.items() if at == k and n not in refills) for k in range(len(order)))
    return Recipe(tuple(order), tuple(starts), tuple(inputs), dead)


def _unpack(slot: Slot, observer: Observer | None = None) -> Tensor:
    if observer is not None:
        observer.unpack(slot)
    if slot.kept is not None:
        return slot.kept.get()
    record = slot.record
    assert record is not None
    key = (slot.atom, slot.place)
    for _ in range(2):
        tensor, version = record.refilled.pop(key, (None, 0))
        if tensor is not None:
            if tensor._version != version:
                raise RecoveryError(f"An operation changed a tensor {tuple(tensor.shape)} in place that its gradient needs.")
            return tensor
        _recover(record, key)
    name = record.shared.program.spans.atoms[slot.atom].name
    raise RecoveryError(f"{name} saved other tensors in this call than in the first. Call revzoo.release(module).")


@exclude_from_compilation
def _recover(record: _Record, key: tuple[int, int] | None = None) -> None:
    """Refill the slots of a span; if it lies in a nest, those that the nest's recovery refills apart from the others."""
    with record.lock:
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
    send_comparisons()


class _Recovery:
    """The second run of one span."""

    def __init__(self, record: _Record):
        judge_arrived()
        self._record = record
        self._shared = record.shared
        self._program = record.shared.program
        self._recipe = self._program.recipes[record.number]
        self._env: dict[Node, Any] = {node: _restore(kept) for node, kept in record.starts.items()}
        self._env |= {node: _restore(kept) for node, kept in (record.handed or {}).items()}
        record.handed = None
        # From here on, autograd's graph alone decides how long these live; a retained graph has them for another recovery.
        for node in record.held_by_slots:
            if isinstance(kept := record.starts[node], _Kept):
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
        under = groupby(
            enumerate(self._recipe.atoms), key=lambda each: (id(shared.settings[each[1]]), shared.grad_modes[each[1]])
        )
        with torch.autograd.graph.saved_tensors_hooks(self._pack, _refuse):
            for (_, grad_mode), atoms in under:
                first = list(atoms)
                shared.settings[first[0][1]].run(partial(self._run_atoms, first, grad_mode))
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
        atom, env = self._program.spans.atoms[i], self._env
        self._atom, self._place = i, 0
        local = {node: env[node] for node in atom.reads}
        for node in atom.statistics:
            local[node] = self._shared.statistics[node].clone()  # they move once, in forward
        for node, call in self._program.calls[i]:
            local[node] = call(local)
        for node in atom.makes:
            env[node] = map_tensors(_cut, local[node])
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
        key, expected = self._record.fingerprint
        tensor, _ = self._record.refilled.get(key, (None, 0))
        if tensor is not None:
            name = self._program.spans.atoms[key[0]].name
            Watch().compare(name, expected, tensor, _LARGEST_DIFFERENCE, of_state=False)


def _cut(tensor: Tensor) -> Tensor:
    """Return a result as a leaf, so that the graph of the atom that has made it is freed."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _read_geometry(tensor: Tensor) -> Geometry:
    return tensor.size(), tensor.stride(), tensor.storage_offset()


def _take_view(value: Tensor, geometry: tuple[Sequence[int], Sequence[int], int]) -> tuple[Tensor, int]:
    """Return what a slot had saved of a result, and its version."""
    tensor = detach(value)
    if _read_geometry(tensor) != geometry:
        with torch.no_grad():
            tensor = tensor.as_strided(*geometry)
    return tensor, tensor._version


def _restore(kept: Any) -> Any:
    """Return a kept value as the first run saw it."""

    def restore(each: Any) -> Any:
        if isinstance(each, ref):
            each = each()
            assert each is not None, "a slot holds it"
        if not isinstance(each, _Kept):
            return each
        tensor = each.get()
        return tensor.detach().requires_grad_(each.requires_grad) if each.requires_grad else tensor

    if isinstance(kept, list | tuple):
        return type(kept)(map(restore, kept))
    return restore(kept)


def _refuse(_: None) -> Tensor:
    raise RecoveryError("The planned module differentiates inside its own forward. Call revzoo.release(module).")


class _Makers:
    """Which input or call has made a storage. Addresses are used again, so that a storage has to be alive."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Node, ref[torch.UntypedStorage], _Kind]] = {}

    def note(self, value: Any, node: Node) -> None:
        """Note the storages of a value, unless they are known as those of an earlier one."""
        for tensor in tensors_in(value):
            if self.find(tensor) is None:
                storage = tensor.untyped_storage()
                self._known[id(storage)] = node, ref(storage), _read_kind(tensor)

    def find(self, tensor: Tensor) -> Node | None:
        storage = tensor.untyped_storage()
        node, known, _ = self._known.get(id(storage), (None, None, None))
        return node if known is not None and known() is storage else None

    def can_lie_in(self, tensor: Tensor) -> bool:
        """Return whether size and strides suffice to find a tensor in its maker's result: no other dtype, no conjugate."""
        _, _, kind = self._known.get(id(tensor.untyped_storage()), (None, None, None))
        return kind == _read_kind(tensor)


def _read_kind(tensor: Tensor) -> _Kind:
    return tensor.dtype, tensor.is_conj(), tensor.is_neg()
