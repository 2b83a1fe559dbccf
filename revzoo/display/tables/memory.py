"""The memory of a training step as a table, one column for each mode."""

from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Table
from torch import nn

from revzoo.analysis.memory_report import LABELS, MemoryReport, measure_modes
from revzoo.format import format_bytes

_SCHEDULED = ("after_forward_bytes", "activation_bytes", "peak_bytes")  # what the choice of mode can change


@dataclass(frozen=True)
class MemoryTable:
    """The same training step in every mode; prints itself with rich.

    Args:
        reports: by mode, or under "as it is" for a model without a schedule.
        current: the mode in force, or None for a mixed schedule.
    """

    reports: dict[str, MemoryReport]
    current: str | None = None

    def __rich__(self) -> Table:
        caption = "The schedule changes activations only; everything above them is the same in every mode."
        table = Table(title="Where memory goes", caption=caption if len(self.reports) > 1 else None)
        table.add_column("")
        for mode in self.reports:
            table.add_column(f"{mode} *" if mode == self.current else mode, justify="right")
        for field, label in LABELS.items():
            sizes = [getattr(report, field) for report in self.reports.values()]
            if any(sizes):
                table.add_row(label, *map(format_bytes, sizes), style="bold" if field in _SCHEDULED else None)
        return table


def memory_table(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer | None = None) -> MemoryTable:
    """Measure a training step in every mode without allocating anything, and lay it out as a table.

    Args: as `revzoo.measure_memory`; a model without a `schedule` is measured as it is.
    """
    return MemoryTable(*measure_modes(model, batch, optimizer))
