"""A plan for any module: what its forward keeps, what it was made for, and what it takes."""

import json
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from revzoo.errors import PlanError
from revzoo.format import format_bytes
from revzoo.planning.reforwarding.graph_plan import GraphPlan, compute_digest
from revzoo.planning.setting import Setting, read_setting
from revzoo.runtime.graph.atoms import inline_checkpoints
from revzoo.runtime.graph.captured_call import Runner, replace_call, restore_call
from revzoo.runtime.graph.spanned_graph import SpannedGraph


@dataclass(frozen=True)
class ModulePlan:
    """What any module keeps from forward to backward, and the memory and work of a training step with it.

    Args:
        graph: the spans of the module's graph.
        peak_bytes: counted peak of all memory together: weights, gradients, optimizer state, batch and activations.
        budget_bytes: limit that the peak had to stay within.
        extra_flops: of one forward and backward, beyond those of storing everything.
        total_flops: of one forward and backward that stores everything.
        min_peak_bytes: the smallest peak that was found.
        no_recompute_peak_bytes: peak of storing everything.
        setting: module, batch, dtype and device that the plan holds for.
        notes: remarks for the reader.
    """

    graph: GraphPlan
    peak_bytes: int
    budget_bytes: int
    extra_flops: int
    total_flops: int
    min_peak_bytes: int
    no_recompute_peak_bytes: int
    setting: Setting
    notes: tuple[str, ...] = ()

    def apply(self, module: nn.Module, batch: Any = None) -> None:
        """Have the module keep what is planned, from its next call on. Its class, keys and hooks stay as they are.

        The first call captures the module's graph again, which takes seconds. Calls with other shapes or dtypes, or in eval
        mode, store everything; the first of them in training says so.

        Args:
            module: the one planned for, or an equal one.
            batch: where given, it must have the shapes and dtypes of the one planned for.
        Raises:
            PlanError: module, dtype, device, training mode or batch differ from those planned for; names what differs.
        """
        if reasons := list(self.setting.differences(read_setting(module, batch))):
            raise PlanError(
                f"This plan was made for other circumstances ({'; '.join(reasons)}). Make a new one with "
                "revzoo.plan(module, batch, budget)."
            )
        restore_call(module)
        if self.graph.ends:
            replace_call(module, _PlannedRunner(self))

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON."""
        Path(path).write_text(json.dumps(asdict(self)) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> "ModulePlan":
        """Read a plan.

        Raises:
            PlanError: there is no such file, or it is not a plan for a module.
        """
        try:
            fields = json.loads(Path(path).read_text())
            graph = {key: _freeze(value) for key, value in fields["graph"].items()}
            setting = {key: _freeze(value) for key, value in fields["setting"].items()}
            return cls(
                **{**fields, "graph": GraphPlan(**graph), "setting": Setting(**setting), "notes": tuple(fields["notes"])}
            )
        except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            raise PlanError(f"{path} is not a saved plan for a module ({error}). plan.save(path) writes one.") from error

    def __str__(self) -> str:
        spans = f"{len(self.graph.ends)} spans of {len(self.graph.atoms)} calls, {len(self.graph.kept)} results kept"
        lines = [
            f"{self.setting.model}, batch of {', '.join(self.setting.batch)}, {self.setting.dtype} on {self.setting.device}",
            f"peak {format_bytes(self.peak_bytes)} of {format_bytes(self.budget_bytes)} "
            f"(all stored {format_bytes(self.no_recompute_peak_bytes)}, at least {format_bytes(self.min_peak_bytes)})",
            f"{spans}; {self.extra_flops / max(1, self.total_flops):.2%} more FLOPs"
            if self.graph.ends
            else "everything stored",
            *self.notes,
        ]
        return "\n".join(lines)


def release(module: nn.Module) -> None:
    """Undo `plan.apply(module)`: the module stores everything again. Nothing happens to one without a plan.

    Args:
        module: any.
    """
    restore_call(module)


class _PlannedRunner:
    """The backend that runs the graph that was planned as planned, and any other as it is."""

    def __init__(self, plan: ModulePlan):
        self._plan = plan
        self._has_warned = False

    def __call__(self, graph: GraphModule, inputs: Sequence[Any]) -> Runner:
        inline_checkpoints(graph)
        if compute_digest(graph, inputs) == self._plan.graph.digest:
            return SpannedGraph(graph, self._plan.graph.bind(graph))
        if torch.is_grad_enabled() and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"A call of {self._plan.setting.model} differs from the one that was planned (batch of "
                f"{', '.join(self._plan.setting.batch)}), so it stores everything. Plan again for this batch, or drop the last "
                "incomplete batch.",
                stacklevel=2,
            )
        return graph.forward


def _freeze(value: Any) -> Any:
    return tuple(map(_freeze, value)) if isinstance(value, list) else value
