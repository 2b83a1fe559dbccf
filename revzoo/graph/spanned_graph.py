"""Running a captured graph so that backward recovers what it needs span by span.

The calls of the graph run as ordinary autograd code under `saved_tensors_hooks`. Of what autograd saves, the pack hook keeps
parameters, inputs of the graph and what the plan names; it drops the rest and leaves a `Slot`. Unpacking the first dropped slot
of a span in backward recovers the whole span (`recovery.py`).
"""

from bisect import bisect_right
from collections.abc import Sequence
from functools import partial
from threading import RLock
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch._C._autograd import _get_sequence_nr
from torch.fx import GraphModule, Node

from revzoo.graph.atoms import Atom, list_dead, list_written, prepare_calls, prepare_inputs
from revzoo.graph.digest import SharedInputs, find_shared
from revzoo.graph.recovery import Kept, Observer, Shared, Slot, SpanRecord, read_geometry, read_slot, read_slot_and_tell
from revzoo.graph.spans import Nest, SpanRecovery, Spans, find_recipe
from revzoo.runtime.compiling import exclude_from_compilation
from revzoo.runtime.fingerprint import take_fingerprint
from revzoo.runtime.nested import map_tensors, tensors_in
from revzoo.runtime.random_state import RandomState, find_generators
from revzoo.runtime.refill_hooks import detach
from revzoo.runtime.round import begin_round
from revzoo.runtime.settings import Settings
from revzoo.runtime.transforms import must_store
from revzoo.runtime.tripwire import get_setting

_Kind = tuple[torch.dtype, bool, bool]  # dtype, whether it is a conjugate or negative view
# A tensor that an atom saves besides its inputs and results is kept if it is this many times smaller than they are. If the atom
# runs again anyway, the tensor is dropped at the end of the span, unless the span lies in a nest.
_SMALL = 64
_LARGEST_DIFFERENCE = 1e-2  # relative, of what kernels compute that do not repeat every bit


class SpannedGraph:
    """A captured graph whose calls keep what a plan names, callable as the graph is.

    Args:
        graph: as captured.
        spans: what is kept, and what is recovered together.
        observer: hears what happens.
        first: the observer's number of the first atom.
    """

    def __init__(self, graph: GraphModule, spans: Spans, observer: Observer | None = None, first: int = 0):
        place = {node: i for i, node in enumerate(graph.graph.nodes)}
        self.graph = graph
        self.spans = spans
        self.observer, self.first = observer, first
        self.recipes: dict[int, SpanRecovery] = {}  # by span, from the first call on
        self.bind, self.calls = prepare_inputs(graph), prepare_calls(graph, spans.atoms)
        self.written = list_written(spans.atoms)
        self.placeholders = graph.graph.find_nodes(op="placeholder")
        self.shared: SharedInputs | None = None  # which inputs lie in one memory that is written to, in the first call
        self.starts = self._list_starts()
        places = [place[node] for atom in spans.atoms for node in atom.nodes]
        self.places = [] if places == sorted(places) else places  # in the graph, of calls that run in another order
        self._output = next(node for node in graph.graph.nodes if node.op == "output")
        self.dead_after = list_dead(spans.atoms)

    def _list_starts(self) -> set[Node]:
        """Return the kept results that atoms read which may run again."""
        kept, inside = self.spans.kept, self.spans.kept_inside
        again = (atom for i, atom in enumerate(self.spans.atoms) if i not in inside or not kept.issuperset(atom.makes))
        return {node for atom in again for node in atom.reads if node in kept}

    def fits(self, inputs: Sequence[Any]) -> bool:
        """Return whether the inputs that lie in one memory are those of the first call, where calls write to them."""
        return not self.written or self.shared in (None, find_shared(self.placeholders, inputs, self.spans.atoms))

    @exclude_from_compilation
    def __call__(self, *inputs: Any) -> Any:
        if self.shared is None:
            self.shared = find_shared(self.placeholders, inputs, self.spans.atoms)
            names = {name for each in self.shared for name in each}
            self.written |= {node for node in self.placeholders if node.name in names}
        if not torch.is_grad_enabled() or must_store():
            return self.graph.forward(*inputs)
        return _Run(self, inputs).forward(self._output)


class _Packed:
    """What autograd saves in one atom. The hooks live as long as autograd's graph, so they hold this and no more."""

    def __init__(self) -> None:
        self.atom = 0
        self.record: SpanRecord | None = None
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
        self._env: dict[Node, Any] = program.bind(inputs)
        self._inputs = dict(self._env)
        self._versions = {
            node: value._version
            for node, value in self._inputs.items()
            if isinstance(value, Tensor) and not value.is_inference() and node not in program.written
        }
        self._given = {t.grad_fn for t in tensors_in(list(inputs))} if program.places else set()
        self._begun: list[int] = []  # by call: autograd's number for its first node
        self._devices = {t.device for t in tensors_in(list(self._inputs.values()))}
        first = next((x for x in inputs if isinstance(x, Tensor)), None)
        round = None if first is None else begin_round(program, first)
        observer, first_atom = program.observer, program.first
        self.shared = Shared(program.spans.atoms, program.calls, program.recipes, round, observer, first_atom)
        self._held: dict[Node, Any] = {}
        self._held_by_slots = set[Node]()  # those that live as long as a slot in autograd's graph
        self._makers = _Makers()
        for node, value in self._env.items():
            self._makers.note(value, node)
        self._packed = _Packed()
        self._small: list[ref[Slot]] = []  # of the present span, kept for being small alone
        self._unpack = read_slot if observer is None else partial(read_slot_and_tell, observer=observer, first=first_atom)

    def forward(self, output: Node) -> Any:
        spans = self._program.spans
        lock = RLock()
        records = [SpanRecord(i, lock, self.shared) for i in range(len(spans.ends))]
        device = next((d for d in self._devices if d.type != "cpu"), torch.device("cpu"))
        settings = Settings(device)
        nest_of = {i: (number, nest) for number, nest in enumerate(spans.nests) for i in range(nest.first, nest.end)}
        nests = [SpanRecord(-1 - number, lock, self.shared) for number in range(len(spans.nests))]
        start = 0
        with torch.autograd.graph.saved_tensors_hooks(self._packed.pack, self._unpack):
            for record, end in zip(records, spans.ends, strict=True):
                for i in range(start, end):
                    self.shared.settings.append(settings)
                    self.shared.grad_modes.append(torch.is_grad_enabled())
                    self._run_atom(i, record)
                    if not spans.atoms[i].is_repeatable:
                        settings = Settings(device)  # it may have entered autocast
                _, nest = nest_of.get(record.number, (0, None))
                self._end_span(record, nest)
                start = end
        for i, record in enumerate(records):
            number, nest = nest_of.get(i, (0, None))
            if record.slots:
                recipe = self._program.recipes[i]
                self._hold_starts(record, recipe, frozenset() if nest is None else nest.handed)
            if nest is not None and (record.slots or record.handed_slots):
                record.nest = nests[number]
                nests[number].inside.append(ref(record))
        for number, nest in enumerate(spans.nests):
            self._prepare_nest(nests[number], nest)
        results = torch.fx.node.map_arg(output.args[0], self._env.__getitem__)
        if self._program.places:
            self._number_nodes(results)
        return results

    def _number_nodes(self, results: Any) -> None:
        """Give autograd's nodes the numbers that they had if no atom had moved: backward sums gradients by them."""
        waiting: list[Any] = [t.grad_fn for t in tensors_in([results, *self._inputs.values()])]
        seen, places = {None, *self._given}, self._program.places
        own: list[tuple[int, int, Any]] = []
        end = _get_sequence_nr()
        while waiting:
            node = waiting.pop()
            if node in seen:
                continue
            seen.add(node)
            number = node._sequence_nr()
            if self._begun[0] <= number < end:  # the nodes of leaves have a higher one
                own.append((places[bisect_right(self._begun, number) - 1], number, node))
                waiting += [each for each, _ in node.next_functions]
        own.sort(key=lambda each: each[:2])
        for (_, _, node), number in zip(own, sorted(number for _, number, _ in own), strict=True):
            node._set_sequence_nr(number)

    def _run_atom(self, i: int, record: SpanRecord) -> None:
        program, env = self._program, self._env
        atom = program.spans.atoms[i]
        if program.observer is not None:
            program.observer.begin(program.first + i)
        random = None
        if atom.draws:
            random = RandomState(find_generators(self._devices))  # of all inputs: torch.rand(2, device="cuda") reads none
        self._packed.atom, self._packed.record = i, record
        for node, call in program.calls[i]:
            if program.places:
                self._begun.append(_get_sequence_nr())
            env[node] = call(env)
        if random is not None:
            random.end_first_run()
            self.shared.random[i] = random
        for node in atom.statistics:
            self.shared.statistics[node] = detach(env[node])
        self._settle(i, record)
        for node in program.dead_after[i]:
            del env[node]

    def _settle(self, i: int, record: SpanRecord) -> None:
        """Keep or drop each tensor saved in atom i. The atom has just returned its results."""
        program = self._program
        spans, env, makers = program.spans, self._env, self._makers
        atom = spans.atoms[i]
        for node in atom.makes:
            value = env[node]
            if node in program.starts:
                self._held[node] = map_tensors(self._keep_start, value)
            if isinstance(value, Tensor):
                makers.note(value, node)
        saved = self._packed.take()
        for slot in saved:
            tensor = slot.tensor
            assert tensor is not None
            maker = makers.find(tensor)
            is_input = maker in self._inputs
            slot.source = None if is_input or not makers.can_lie_in(tensor) else maker
            slot.is_small = not is_input and slot.source is None and self._is_small(tensor, atom)
            if (
                is_input
                or tensor._version != slot.writes  # which is an error if backward asks for it
                or not atom.is_repeatable
                or maker in spans.kept
                or slot.is_small
                or (slot.source is None and i in spans.kept_inside)
            ):
                holder = None if is_input or maker is None else self._held.get(maker)
                slot.keep(holder)
                if slot.is_small and maker is None and i not in spans.kept_inside and atom.is_repeatable:
                    self._small.append(ref(slot))
                if maker is not None and isinstance(holder, Kept):
                    self._held_by_slots.add(maker)
                continue
            if slot.source is not None:
                slot.geometry = read_geometry(tensor)
            record.slots.append((i, slot.place, slot.source, slot.geometry))
            record.latest = slot
        latest = record.latest
        if latest is not None and latest.tensor is not None and self.shared.round is not None:
            tolerance = 0.0 if self._repeats(spans.atoms[latest.atom], latest.tensor) else _LARGEST_DIFFERENCE
            taken = take_fingerprint(latest.tensor, bits=not tolerance)
            record.fingerprint = None if taken is None else ((latest.atom, latest.place), taken, tolerance)
        if program.observer is not None:
            program.observer.end(program.first + i, saved, {node: env[node] for node in atom.makes})
        for slot in saved:
            slot.tensor = None

    def _repeats(self, atom: Atom, tensor: Tensor) -> bool:
        """Return whether the kernels of an atom compute the same bits of a tensor in every run."""
        sums = any("put" in str(node.target) for node in atom.nodes)  # in any order
        return torch.are_deterministic_algorithms_enabled() or (tensor.device.type == "cpu" and not sums)

    def _is_small(self, tensor: Tensor, atom: Atom) -> bool:
        around = (t for node in (*atom.makes, *atom.reads) for t in tensors_in(self._env[node]))
        return tensor.untyped_storage().nbytes() * _SMALL <= max((t.nbytes for t in around), default=0)

    def _end_span(self, record: SpanRecord, nest: Nest | None) -> None:
        """Find what the recovery of a span runs again, and outside of nests drop what is small and made by it."""
        handed = frozenset[Node]() if nest is None else nest.handed
        record.handed_slots = [slot for slot in record.slots if slot[2] in handed]
        record.slots = [slot for slot in record.slots if slot[2] not in handed]
        record.latest = None  # a slot holds its record
        recipe = self._program.recipes.get(record.number)
        if recipe is None:
            recipe = self._program.recipes[record.number] = find_recipe(self._program.spans, record.slots, handed)
        small, self._small = [slot for each in self._small if (slot := each()) is not None], []
        for slot in small:
            if nest is None and slot.atom in recipe.atoms:
                slot.drop(record)
                record.slots.append((slot.atom, slot.place, None, None))

    def _prepare_nest(self, record: SpanRecord, nest: Nest) -> None:
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

    def _hold_starts(self, record: SpanRecord, recipe: SpanRecovery, handed: frozenset[Node] = frozenset()) -> None:
        record.starts = {node: self._held[node] for node in recipe.starts if node not in handed}
        record.held_by_slots = self._held_by_slots.intersection(record.starts)
        record.starts |= {node: self._keep_input(node) for node in recipe.inputs}

    def _keep_input(self, node: Node) -> Any:
        """Keep an input as it was when the graph began, unless a call is known to write to it."""
        if node not in self._held:
            version = self._versions.get(node)
            self._held[node] = map_tensors(lambda t: self._keep_start(t, version), self._inputs[node])
        return self._held[node]

    def _keep_start(self, tensor: Tensor, version: int | None = None) -> Kept:
        """Keep what a recovery starts from."""
        kept = Kept(tensor, version)
        if get_setting():
            kept.mark(in_full=self.shared.round is not None)
        return kept


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
