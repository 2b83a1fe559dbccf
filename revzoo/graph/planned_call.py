"""Calls of a module that follow its plan. One that matches the planned one runs as planned; any other stores everything."""

import gc
import itertools
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from threading import local
from typing import Any, cast
from weakref import proxy

import torch
from torch import nn
from torch._dynamo.exc import TorchDynamoException
from torch.fx import GraphModule
from torch.utils._python_dispatch import _disable_current_modes

from revzoo.device import is_sharded
from revzoo.graph.atoms import read_key, split_into_atoms
from revzoo.graph.compiled_call import CompiledCall, Runner
from revzoo.graph.digest import compute_digest, find_shared, name_nodes
from revzoo.graph.graph_plan import GraphPlan, list_names
from revzoo.graph.refusal import describe_backward_hooks, describe_modes
from revzoo.graph.spanned_graph import SpannedGraph
from revzoo.planning.setting import Setting, list_shapes
from revzoo.runtime.nested import tensors_in
from revzoo.runtime.replaced_call import is_replaced
from revzoo.runtime.transforms import must_store, warn_user

_MOST_VARIANTS = 8  # of what the compiler has made of one module; after these it begins again


class PlannedCall:
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
        take = partial(PlannedCall._take, cast(PlannedCall, proxy(self)))
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
        own = {list_names(atom, names) for atom in atoms}
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
