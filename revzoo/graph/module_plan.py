"""A plan for any module (what forward keeps, for which setting, at which cost), and calls of the module that follow it.

A plan names the calls of a graph, so that it can be saved, and is checked against the graph it is applied to. A call of the
module that matches the planned one runs as planned; any other call stores everything.
"""

import gc
import itertools
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from threading import local
from typing import Any, cast
from weakref import WeakKeyDictionary, proxy

import torch
from torch import nn
from torch._dynamo.exc import TorchDynamoException
from torch.fx import GraphModule, Node
from torch.utils._python_dispatch import _disable_current_modes

from revzoo.analysis.chains import find_block_chains, find_chains
from revzoo.device import is_sharded
from revzoo.errors import PlanError
from revzoo.file import parse_json
from revzoo.format import format_bytes, format_seconds, format_spread
from revzoo.graph.atoms import Atom, list_written, read_key, split_into_atoms
from revzoo.graph.capture import GraphCall
from revzoo.graph.compiled_call import CompiledCall, Runner
from revzoo.graph.compiler import Limit, carry_limit
from revzoo.graph.digest import SharedInputs, compute_digest, find_shared, name_nodes
from revzoo.graph.refusal import describe_backward_hooks, describe_modes, require_unplanned, unwrap
from revzoo.graph.spanned_graph import SpannedGraph
from revzoo.graph.spans import Nest, Spans
from revzoo.planning.setting import Setting, list_shapes, read_setting
from revzoo.runtime.mode import Mode
from revzoo.runtime.nested import tensors_in
from revzoo.runtime.replaced_call import is_replaced, replace_call, restore_call
from revzoo.runtime.transforms import must_store, warn_user

_MOST_VARIANTS = 8  # of what the compiler has made of one module; after these it begins again


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
            atoms=tuple(_list_names(atom, names) for atom in spans.atoms),
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
        place = {each: i for i, atom in enumerate(atoms) if (each := _list_names(atom, names)) in own}
        if not self.ends or 2 * len(place) < len(atoms):
            return None
        before = (next((each for each in reversed(self.atoms[:end]) if each in place), None) for end in self.ends)
        ends = {place[each] + 1 for each in before if each is not None}
        kept = {node for atom in atoms for node in atom.makes if names[node] in self.kept or not atom.is_repeatable}
        inside = {place[each] for i in self.kept_inside if (each := self.atoms[i]) in place}
        return Spans(atoms, sorted({*ends, len(atoms)}), frozenset(kept), frozenset(inside))


@dataclass(frozen=True)
class ModulePlan:
    """What any module keeps from forward to backward, and the memory and work of a training step with it.

    Args:
        graphs: the spans of the calls of captured graphs in a forward, in order.
        schedules: of the reversible chains in the module, by path.
        peak_bytes: counted peak of all memory together: weights, gradients, optimizer state, batch and activations.
        budget_bytes: limit that the peak had to stay within.
        extra_flops: of one forward and backward, beyond those of storing everything.
        total_flops: of one forward and backward that stores everything.
        min_peak_bytes: the smallest peak that was found; None where everything fits, so that nothing was searched.
        no_recompute_peak_bytes: peak of storing everything.
        left_bytes: of all these peaks, what is no activation: weights, gradients, optimizer state and batch.
        gradient_bytes: of that, the gradients.
        loss_bytes: what the loss takes.
        setting: module, batch, dtype and device that the plan holds for.
        assumes: whether it is for batches without padding, as the planned one, whose attention needs no mask.
        notes: remarks for the reader.
        seconds: of one forward and backward with the plan; None where nothing was timed.
        stored_seconds: of one that stores everything.
        spread: by how much of themselves these seconds differ if they are measured again: the standard error.
        compiled_activation_bytes: limit of the search in the compiler, as that counts; None: what the budget leaves.
        compiled_peak_bytes: the peak of the compiled module with that, measured; None where it was not.
    """

    graphs: tuple[GraphPlan, ...]
    schedules: tuple[tuple[str, tuple[Mode, ...]], ...]
    peak_bytes: int
    budget_bytes: int
    extra_flops: int
    total_flops: int
    min_peak_bytes: int | None
    no_recompute_peak_bytes: int
    left_bytes: int
    gradient_bytes: int
    loss_bytes: int
    setting: Setting
    assumes: bool = True
    notes: tuple[str, ...] = ()
    seconds: float | None = None
    stored_seconds: float | None = None
    spread: float | None = None
    compiled_activation_bytes: int | None = None
    compiled_peak_bytes: int | None = None

    def apply(self, module: nn.Module, batch: Any = None) -> None:
        """Have the module keep what is planned, from its next call on. Its class, keys and hooks stay as they are.

        The first call captures the module's graphs again, which takes seconds. Calls with other shapes or dtypes, or in eval
        mode, store everything; those that leave out an argument, add a number, or take another branch, keep what is planned for
        the calls that they share. The first of them in training says so.

        Args:
            module: the one planned for, or an equal one.
            batch: where given, it must have the shapes and dtypes of the one planned for.
        Raises:
            InputError: a part of it has a plan, or is what torch.compile has made of another module.
            PlanError: module, dtype, device, training mode or batch differ from those planned for; names what differs.
        """
        module = unwrap(module)
        require_unplanned(module, may_have_plan=True)
        self.setting.require_same(read_setting(module, batch))
        planned = _PlannedCall(module, self.graphs, self.setting, self.assumes, self.peak_bytes > self.budget_bytes)
        _undo(module)
        if self.drops_something or self.schedules:
            _schedules_before[module] = set_schedules(module, {path: list(modes) for path, modes in self.schedules})
            replace_call(module, planned)
        carry_limit(module, self._limit)

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON."""
        Path(path).write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> "ModulePlan":
        """Read a plan.

        Raises:
            PlanError: there is no such file, or it is not a plan for a module.
        """
        try:
            fields = {key: _freeze(value) for key, value in parse_json(Path(path).read_bytes()).items()}
            if "units" in fields:
                raise ValueError("it is that of a model of the zoo or a chain, which revzoo.Plan.load reads")
            fields["graphs"] = tuple(GraphPlan(**each) for each in fields["graphs"])
            fields["schedules"] = tuple((name, tuple(map(Mode, modes))) for name, modes in fields["schedules"])
            return cls(**fields | {"setting": Setting(**fields["setting"])})
        except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
            raise PlanError(f"{path} is not a saved plan for a module ({error}). plan.save(path) writes one.") from error

    @property
    def _limit(self) -> Limit:
        measured, stored = self.compiled_activation_bytes, self.no_recompute_peak_bytes - self.left_bytes
        activations = self.budget_bytes - self.left_bytes if measured is None else measured
        sizes = activations, stored, self.gradient_bytes, self.loss_bytes
        return Limit(self.setting.model, *sizes, is_measured=measured is not None)

    @property
    def drops_something(self) -> bool:
        """Whether anything is recovered."""
        return any(graph.ends for graph in self.graphs)

    def describe_work(self) -> str:
        """Return what a step takes beyond one that stores everything: "1.20% more FLOPs, 3.4% more time (2.4 s)"."""
        flops = f"{self.extra_flops / max(1, self.total_flops):.2%} more FLOPs"
        if self.seconds is None or self.stored_seconds is None:
            return flops
        ratio = self.seconds / max(self.stored_seconds, 1e-9) - 1
        return f"{flops}, {ratio:.1%} more time ({format_seconds(self.seconds)}{format_spread(self.spread)})"

    def __str__(self) -> str:
        spans, calls, kept = (sum(len(getattr(graph, name)) for graph in self.graphs) for name in ("ends", "atoms", "kept"))
        work = f"{spans} spans of {calls} calls, {kept} results kept; {self.describe_work()}"
        least = "" if self.min_peak_bytes is None else f", at least {format_bytes(self.min_peak_bytes)}"
        lines = [
            f"{self.setting.model}, {self.setting.describe()}",
            f"peak {format_bytes(self.peak_bytes)} of {format_bytes(self.budget_bytes)} "
            f"(all stored {format_bytes(self.no_recompute_peak_bytes)}{least})",
            work if self.drops_something else "everything stored",
            *self.notes,
        ]
        return "\n".join(lines)


def release(module: nn.Module) -> None:
    """Undo `plan.apply(module)`: the module stores everything again. Nothing happens to one without a plan.

    In a network that `reversible_` changed, blocks have the modes again that they had before the plan.

    Args:
        module: any.
    Raises:
        InputError: no module.
    """
    module = unwrap(module)
    _undo(module)
    for chain in find_block_chains(module).values():
        chain.end_plan()


_schedules_before: WeakKeyDictionary[nn.Module, dict[str, list[Mode]]] = WeakKeyDictionary()


def _undo(module: nn.Module) -> None:
    restore_call(module)
    carry_limit(module, None)
    set_schedules(module, _schedules_before.pop(module, {}))


def set_schedules(module: nn.Module, schedules: Mapping[str, list[Mode]]) -> dict[str, list[Mode]]:
    """Give the chains of a module their schedules, and return those that they had."""
    chains = {prefix.removesuffix("."): chain for prefix, chain in find_chains(module).items()}
    before = {path: chains[path].schedule for path in schedules}
    for path, modes in schedules.items():
        chains[path].schedule = modes
    return before


class _PlannedCall:
    """The call that replaces a module's own.

    Args:
        module: the one that is called.
        plans: of the calls of captured graphs in a forward, in order.
        setting: what they were made for.
        assumes: as of the plan.
        is_for_compiled: whether only the compiled module keeps the budget.
    """

    def __init__(self, module: nn.Module, plans: Sequence[GraphPlan], setting: Setting, assumes: bool, is_for_compiled: bool):
        self._module, self._plans, self._setting, self._is_for_compiled = module, plans, setting, is_for_compiled
        self._parts = [each for each in module.modules() if each is not module]
        take = partial(_PlannedCall._take, cast(_PlannedCall, proxy(self)))
        self._captured = CompiledCall(module, take, follows_numbers=True)
        self._captured.assumes = assumes
        self._thread = local()
        self._num_variants, self._drops_numbers = 0, False
        self._warned = set[str]()  # of what

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module, setting = self._module, self._setting
        if not torch.is_grad_enabled() or module.training != setting.training or self._runs_in_parts():
            return module._call_impl(*args, **kwargs)
        if self._is_for_compiled:
            self._warn(
                "compiled", f"The plan of {setting.model} is for the compiled module. Uncompiled, its peak is above the budget."
            )
        shapes = list_shapes((args, kwargs))
        if sorted(shapes) != sorted(setting.batch):
            self._warn_of_difference(", not of " + ", ".join(shapes))
            if not {each for each in shapes if not each.startswith("[] ")} <= set(setting.batch):
                # Otherwise it leaves out an argument, or adds a number, as Transformers' Trainer does.
                return module._call_impl(*args, **kwargs)
        self._thread.position, self._thread.has_compiled = 0, False
        try:
            results = self._captured(*args, **kwargs)
        except TorchDynamoException:
            if self._thread.position or not self._captured.has_numbers:
                raise
            self._captured.backend.numbers = None  # something takes no number that is an input
            self._captured.forget()
            results = self._captured(*args, **kwargs)
        if self._thread.has_compiled:
            gc.collect()
            self._note_variant()
        if not self._thread.position and self._plans and not must_store():
            self._warn_of_nothing()
        return results

    def _runs_in_parts(self) -> bool:
        """Return whether parts are compiled in place. The compiler keeps them within the limit, and nothing is captured."""
        compiled = [each for each in self._parts if each._compiled_call_impl is not None and not is_replaced(each)]
        if compiled and 2 * sum(1 for each in compiled for _ in each.modules()) < len(self._parts):
            self._warn(
                "parts",
                f"The plan of {self._setting.model} steps aside, since a {type(compiled[0]).__name__} in it is compiled apart: "
                "what is not compiled stores everything. Compile the whole, model.compile(), or all of its blocks.",
            )
        return bool(compiled)

    def _note_variant(self) -> None:
        """Note that the module was compiled anew, and begin again where that has happened too often."""
        self._num_variants += 1
        if self._num_variants > _MOST_VARIANTS:
            self._warn(
                "variants",
                f"{self._setting.model} is compiled anew again and again, which takes longer than a step: "
                f"{self._captured.backend.reason} is not so any more. Change it less often, make a number a buffer, "
                "or call revzoo.release(module).",
            )
        if self._num_variants > _MOST_VARIANTS or self._drops_numbers:
            self._captured.forget()
            self._num_variants, self._drops_numbers = 0, False

    def _take(self, graph: GraphModule, _: Sequence[Any]) -> Runner:
        programs = defaultdict[int, list[Runner]](list)  # by their place in a forward; they differ in which inputs share memory

        def run(*given: Any) -> Any:
            at: int = self._thread.position
            self._thread.position = at + 1
            if not programs[at]:
                self._thread.has_compiled = True
                gc.collect()  # what the compiler raised where it ended a graph: that holds frames, and these hold tensors
            fitting = (each for each in programs[at] if not isinstance(each, SpannedGraph) or each.fits(given))
            if (program := next(fitting, None)) is None:
                programs[at].append(program := self._choose(graph, at, given))
            return program(*given)

        return run

    def _choose(self, graph: GraphModule, at: int, inputs: Sequence[Any]) -> Runner:
        """Return what runs a graph as planned. Where a forward leaves out calls, it is the next plan of an equal graph."""
        digest, placeholders = compute_digest(graph, inputs), graph.graph.find_nodes(op="placeholder")
        equal = [place for place, plan in enumerate(self._plans) if plan.digest == digest]
        for place in (*(place for place in equal if place >= at), *reversed(equal)):
            plan = self._plans[place]
            spans = plan.bind(graph)
            if find_shared(placeholders, inputs, spans.atoms) == plan.shared:
                if place != at and torch.is_grad_enabled():
                    self._warn_of_difference()
                return SpannedGraph(graph, spans) if plan.ends else graph.forward
        if self._captured.has_numbers:  # they are part of it; the next call has constants
            self._captured.backend.numbers, self._drops_numbers = None, True
        elif torch.is_grad_enabled():
            self._warn_of_difference()
        with _disable_current_modes():  # one that counts what the step allocates would count this, too
            atoms = split_into_atoms(graph, inputs)
        names = name_nodes(graph.graph)
        own = {_list_names(atom, names) for atom in atoms}
        similar = max(self._plans, key=lambda plan: len(own.intersection(plan.atoms)), default=None)
        tensors = [*tensors_in(list(inputs))]
        hides_memory = len({read_key(t) for t in tensors}) < len({t.untyped_storage()._cdata for t in tensors})  # NumPy's, say
        # What gathers divided parameters is freed after forward.
        if similar is None or hides_memory or any(map(is_sharded, self._module.parameters())):
            return graph.forward
        carried = similar.carry_over(atoms, names)
        return graph.forward if carried is None else SpannedGraph(graph, carried)

    def _warn_of_difference(self, received: str = "") -> None:
        if self._captured.assumes and not self._captured.assumed:
            self._warn(
                "padding",
                f"A call of {self._setting.model} has padding or packed texts, and the planned batch had none. Its attention "
                "needs a mask, which is not in the plan, so its peak is another. Plan with a batch that has some.",
            )
            return
        self._warn(
            "difference",
            f"A call of {self._setting.model} differs from the one that was planned (batch of "
            f"{', '.join(self._setting.batch)}{received}), so it stores what is not in the plan, and its peak is another. Plan "
            "again for this batch, or drop the last incomplete batch. With the planned batch, the module, its hooks or what "
            "requires a gradient have changed since: plan again. Or its forward has taken another branch: plan a part that "
            "does not.",
        )

    def _warn_of_nothing(self) -> None:
        off = "torch.compile is off: see TORCH_COMPILE_DISABLE, torch._dynamo.config.disable, torch.compiler.set_stance."
        why = next(itertools.chain(describe_modes(), describe_backward_hooks(self._module)), off)
        self._warn("nothing", f"The plan of {self._setting.model} steps aside, and this call stores everything. {why}")

    def _warn(self, cause: str, message: str) -> None:
        if cause not in self._warned:
            self._warned.add(cause)
            warn_user(message)


def _list_names(atom: Atom, names: Mapping[Node, str]) -> tuple[str, ...]:
    return tuple(names[node] for node in atom.nodes)


def _freeze(value: Any) -> Any:
    """Return what was read from JSON with tuples for lists."""
    if isinstance(value, dict):
        return {key: _freeze(each) for key, each in value.items()}
    return tuple(map(_freeze, value)) if isinstance(value, list) else value
