"""A plan: a schedule, what it was made for, and what it takes."""

import json
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from torch import nn

from revzoo.analysis.chains import assign_tiles, find_block_chains
from revzoo.errors import PlanError
from revzoo.file import parse_json
from revzoo.format import format_bytes, format_seconds, format_spread
from revzoo.planning.profiling.hooks import assign_schedule, list_units
from revzoo.planning.setting import Setting, read_setting
from revzoo.planning.solvers import Solver
from revzoo.planning.solvers.schedule_totals import PhasePeak
from revzoo.runtime.mode import MODES, Mode
from revzoo.runtime.schedule import check_schedule


@dataclass(frozen=True)
class Plan:
    """A schedule and tiles for one model, batch and device, and the memory and time of a training step with them.

    `model.schedule = plan` and `plan.apply(model)` are the same, for models that have a schedule.

    Args:
        units: names of the steps and nodes.
        schedule: their modes.
        peak_bytes: peak of all memory together, as `revzoo.measure_memory` counts it, and on a CUDA device the workspaces of
            kernels.
        budget_bytes: limit that the peak had to stay within.
        seconds: of one forward and backward; None where nothing was run, as where everything can be stored. On a CPU those of
            the calling thread.
        spread: by how much of themselves the seconds differ if they are measured again: the standard error.
        extra_flops: of one forward and backward, beyond those of storing everything.
        min_peak_bytes: the smallest peak that any schedule has.
        no_recompute_peak_bytes: peak of storing everything.
        phase_peaks: the peak within each unit's forward, the loss, and each unit's backward, in order.
        solver: "timeline" or "knapsack".
        setting: model, batch, dtype and device that the plan holds for, and the tiles that it needs.
        max_invert_run: limit for the number of consecutive inverted steps; None is any number.
        notes: remarks for the reader.
        lookahead: how many steps are recovered ahead of backward.
    """

    units: tuple[str, ...]
    schedule: tuple[Mode, ...]
    peak_bytes: int
    budget_bytes: int
    seconds: float | None
    extra_flops: int
    min_peak_bytes: int
    no_recompute_peak_bytes: int
    phase_peaks: tuple[PhasePeak, ...]
    solver: Solver
    setting: Setting
    max_invert_run: int | None = None
    notes: tuple[str, ...] = ()
    lookahead: Literal[0, 1] = 0
    spread: float | None = None

    def apply(self, model: nn.Module, batch: Any = None) -> None:
        """Give the model this schedule, look-ahead and tiles. `revzoo.release` undoes it in one that `reversible_` changed.

        Args:
            model: the one planned for, or an equal one.
            batch: where given, it must have the shapes and dtypes of the one planned for.
        Raises:
            PlanError: model, dtype, device, training mode or batch differ from those planned for; names what differs.
        """
        self.setting.require_same(replace(read_setting(model, batch), tiles=self.setting.tiles))
        if self.units != tuple(entry.name for entry in list_units(model)):
            raise PlanError("This plan has other units than the model. Make a new one with revzoo.plan(model, batch, budget).")
        for chain in find_block_chains(model).values():
            chain.begin_plan()
        assign_tiles(model, self.setting.tiles)
        assign_schedule(model, self.schedule, self.lookahead)

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON."""
        Path(path).write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> "Plan":
        """Read a plan.

        Raises:
            PlanError: there is no such file, or it is not a plan.
        """
        try:
            fields = parse_json(Path(path).read_bytes())
            if "graphs" in fields:
                raise ValueError("it is that of an ordinary module, which revzoo.ModulePlan.load reads")
            if "schedule" in fields and fields.keys() != cls.__dataclass_fields__.keys():
                raise ValueError("its fields are those of another version of revzoo")
            fields |= {key: tuple(fields[key]) for key in ("units", "schedule", "notes")}
            fields["phase_peaks"] = tuple(PhasePeak(**phase) for phase in fields["phase_peaks"])
            lists = {key: tuple(fields["setting"][key]) for key in ("batch", "tiles")}
            fields["setting"] = Setting(**{**fields["setting"], **lists})
            plan = cls(**fields)
            if len(plan.phase_peaks) != 2 * len(plan.units) + 1 or plan.lookahead not in (0, 1):
                raise ValueError("its values do not fit together")
            return replace(plan, schedule=tuple(check_schedule(plan.schedule, plan.units)))
        except (OSError, ValueError, TypeError, LookupError) as error:
            raise PlanError(
                f"{path} is not a saved plan ({error}). revzoo plan NAME --budget SIZE --out FILE writes one."
            ) from error

    def __str__(self) -> str:
        counts = Counter(self.schedule)
        modes = ", ".join(f"{counts[mode]} {mode}" for mode in MODES if counts[mode])
        work = f"; {self.extra_flops:.2e} FLOPs more than storing" if self.extra_flops else ""
        if self.seconds is not None:
            work = f"; {format_seconds(self.seconds)}{format_spread(self.spread)} a training step"
        lines = [
            f"{self.setting.model}, {self.setting.describe()}",
            f"peak {format_bytes(self.peak_bytes)} of {format_bytes(self.budget_bytes)} "
            f"(all stored {format_bytes(self.no_recompute_peak_bytes)}, at least {format_bytes(self.min_peak_bytes)})",
            f"{modes}{', with look-ahead' * self.lookahead}{work}",
            *self.notes,
        ]
        return "\n".join(lines)
