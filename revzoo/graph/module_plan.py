"""A plan for any module: what its forward keeps, what it was made for, and what it takes."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn

from revzoo.analysis.chains import find_block_chains, find_chains
from revzoo.errors import PlanError
from revzoo.format import format_bytes, format_seconds, format_spread
from revzoo.graph.planned_call import GraphPlan, PlannedCall
from revzoo.planning.setting import Setting, read_setting
from revzoo.runtime.mode import Mode
from revzoo.runtime.replaced_call import replace_call, restore_call


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
        min_peak_bytes: the smallest peak that was found.
        no_recompute_peak_bytes: peak of storing everything.
        setting: module, batch, dtype and device that the plan holds for.
        notes: remarks for the reader.
        seconds: of one forward and backward with the plan; None where nothing was timed.
        stored_seconds: of one that stores everything.
        spread: by how much of themselves these seconds differ if they are measured again: the standard error.
    """

    graphs: tuple[GraphPlan, ...]
    schedules: tuple[tuple[str, tuple[Mode, ...]], ...]
    peak_bytes: int
    budget_bytes: int
    extra_flops: int
    total_flops: int
    min_peak_bytes: int
    no_recompute_peak_bytes: int
    setting: Setting
    notes: tuple[str, ...] = ()
    seconds: float | None = None
    stored_seconds: float | None = None
    spread: float | None = None

    def apply(self, module: nn.Module, batch: Any = None) -> None:
        """Have the module keep what is planned, from its next call on. Its class, keys and hooks stay as they are.

        The first call captures the module's graphs again, which takes seconds. Calls with other shapes or dtypes, or in eval
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
        if self.drops_something or self.schedules:
            before = set_schedules(module, {path: list(modes) for path, modes in self.schedules})
            replace_call(module, PlannedCall(module, self.graphs, self.setting), lambda: set_schedules(module, before))

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
            fields = json.loads(Path(path).read_text(encoding="utf-8"))
            graphs = tuple(GraphPlan(**{key: _freeze(value) for key, value in each.items()}) for each in fields["graphs"])
            schedules = tuple((name, tuple(map(Mode, modes))) for name, modes in fields["schedules"])
            setting = {key: _freeze(value) for key, value in fields["setting"].items()}
            return cls(
                **{
                    **fields,
                    "graphs": graphs,
                    "schedules": schedules,
                    "setting": Setting(**setting),
                    "notes": tuple(fields["notes"]),
                }
            )
        except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            raise PlanError(f"{path} is not a saved plan for a module ({error}). plan.save(path) writes one.") from error

    @property
    def drops_something(self) -> bool:
        """Whether anything is recovered."""
        return any(graph.ends for graph in self.graphs)

    def describe_spans(self) -> str:
        """Return the numbers of spans, calls and kept results, in words."""
        spans, calls, kept = (sum(len(getattr(graph, name)) for graph in self.graphs) for name in ("ends", "atoms", "kept"))
        return f"{spans} spans of {calls} calls, {kept} results kept"

    def describe_work(self) -> str:
        """Return what a step takes beyond one that stores everything: "1.20% more FLOPs, 3.4% more time (2.4 s)"."""
        flops = f"{self.extra_flops / max(1, self.total_flops):.2%} more FLOPs"
        if self.seconds is None or self.stored_seconds is None:
            return flops
        ratio = self.seconds / max(self.stored_seconds, 1e-9) - 1
        return f"{flops}, {ratio:.1%} more time ({format_seconds(self.seconds)}{format_spread(self.spread)})"

    def __str__(self) -> str:
        lines = [
            f"{self.setting.model}, {self.setting.describe()}",
            f"peak {format_bytes(self.peak_bytes)} of {format_bytes(self.budget_bytes)} "
            f"(all stored {format_bytes(self.no_recompute_peak_bytes)}, at least {format_bytes(self.min_peak_bytes)})",
            f"{self.describe_spans()}; {self.describe_work()}" if self.drops_something else "everything stored",
            *self.notes,
        ]
        return "\n".join(lines)


def release(module: nn.Module) -> None:
    """Undo `plan.apply(module)`: the module stores everything again. Nothing happens to one without a plan.

    In a network that `reversible_` changed, blocks have the modes again that they had before the plan.

    Args:
        module: any.
    """
    restore_call(module)
    for chain in find_block_chains(module).values():
        chain.end_plan()


def set_schedules(module: nn.Module, schedules: Mapping[str, list[Mode]]) -> dict[str, list[Mode]]:
    """Give the chains of a module their schedules, and return those that they had."""
    chains = {prefix.removesuffix("."): chain for prefix, chain in find_chains(module).items()}
    before = {path: chains[path].schedule for path in schedules}
    for path, modes in schedules.items():
        chains[path].schedule = modes
    return before


def _freeze(value: Any) -> Any:
    return tuple(map(_freeze, value)) if isinstance(value, list) else value
