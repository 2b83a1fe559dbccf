"""A plan for any module: what forward keeps, for which setting, at which cost, and how the module gets it."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from revzoo.analysis.chains import find_block_chains, find_chains
from revzoo.errors import PlanError
from revzoo.file import parse_json
from revzoo.format import format_bytes, format_seconds, format_spread
from revzoo.graph.compiler import Limit, carry_limit
from revzoo.graph.graph_plan import GraphPlan
from revzoo.graph.planned_call import PlannedCall
from revzoo.graph.refusal import require_unplanned, unwrap
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
        planned = PlannedCall(module, self.graphs, self.setting, self.assumes, self.peak_bytes > self.budget_bytes)
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


def _freeze(value: Any) -> Any:
    """Return what was read from JSON with tuples for lists."""
    if isinstance(value, dict):
        return {key: _freeze(each) for key, each in value.items()}
    return tuple(map(_freeze, value)) if isinstance(value, list) else value
