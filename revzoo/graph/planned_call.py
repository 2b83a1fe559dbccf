"""The calls of a module with a plan: as planned where they are the one that was planned, and stored where they are not."""

import warnings
from collections.abc import Sequence
from threading import local
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from revzoo.graph.captured_call import Runner, capture_calls
from revzoo.graph.expansion import expand_calls
from revzoo.graph.graph_plan import GraphPlan, compute_digest
from revzoo.graph.spanned_graph import SpannedGraph
from revzoo.planning.setting import Setting, list_shapes


class PlannedCall:
    """What stands in place of a module's call.

    Args:
        module: the one that is called.
        plans: of the calls of captured graphs in a forward, in order.
        setting: what they were made for.
    """

    def __init__(self, module: nn.Module, plans: Sequence[GraphPlan], setting: Setting):
        self._module, self._plans, self._setting = module, plans, setting
        self._captured = capture_calls(module, self._take)
        self._thread = local()
        self._has_warned = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module, setting = self._module, self._setting
        if not torch.is_grad_enabled() or module.training != setting.training:
            return module._call_impl(*args, **kwargs)
        if sorted(list_shapes((args, kwargs))) != sorted(setting.batch):
            self._warn(", not of " + ", ".join(list_shapes((args, kwargs))))
            return module._call_impl(*args, **kwargs)
        self._thread.position = 0
        return self._captured(*args, **kwargs)

    def _take(self, graph: GraphModule, inputs: Sequence[Any]) -> Runner:
        expand_calls(graph)
        digest = compute_digest(graph, inputs)
        programs: dict[int, Runner] = {}

        def run(*given: Any) -> Any:
            at: int = self._thread.position
            self._thread.position = at + 1
            program = programs.get(at)
            if program is None:
                program = programs[at] = self._choose(graph, digest, at)
            return program(*given)

        return run

    def _choose(self, graph: GraphModule, digest: str, at: int) -> Runner:
        """Return what runs a graph as planned. Where a forward leaves out calls, it is the next plan of an equal graph."""
        equal = [place for place, plan in enumerate(self._plans) if plan.digest == digest]
        place = next((place for place in equal if place >= at), equal[-1] if equal else None)
        if place != at and torch.is_grad_enabled():
            self._warn()
        plan = None if place is None else self._plans[place]
        return SpannedGraph(graph, plan.bind(graph)) if plan is not None and plan.ends else graph.forward

    def _warn(self, received: str = "") -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"A call of {self._setting.model} differs from the one that was planned (batch of "
                f"{', '.join(self._setting.batch)}{received}), so it stores what is not in the plan. Plan again for this "
                "batch, or drop the last incomplete batch. With the planned batch, the module or what requires a gradient has "
                "changed since: plan again. Or its forward has taken another branch: plan a part that does not.",
                stacklevel=3,
            )
