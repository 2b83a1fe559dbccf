"""The memory of a training step as a table with one column for each mode."""

from dataclasses import dataclass

from rich.table import Table

from revzoo.analysis.memory_report import LABELS, MemoryReport
from revzoo.display.tables.base import DottedName, Fitted, make_table
from revzoo.format import format_bytes

_DEPEND_ON_MODE = ("after_forward_bytes", "activation_bytes", "peak_bytes")  # rows that depend on the mode


@dataclass(frozen=True)
class MemoryTable:
    """The memory of the same training step in every mode; rich prints it as a table.

    Args:
        reports: by mode; a model without a schedule has one report, "as it is".
        current: the model's present mode, marked with a star; None if its schedule mixes modes.
    """

    reports: dict[str, MemoryReport]
    current: str | None = None

    def __rich__(self) -> Fitted:
        return Fitted(self._tabulate)

    def _tabulate(self, narrow: bool) -> Table:
        caption = "Counted: every tensor."
        if len(self.reports) > 1:
            caption += " The mode changes the memory of activations only."
        table = make_table(narrow, title="Memory of a training step", caption=caption)
        table.add_column("", min_width=None if narrow else max(map(len, LABELS.values())))
        for mode in self.reports:
            heading = DottedName(f"{mode} *" if mode == self.current else mode, "right")
            table.add_column(heading, justify="right", no_wrap=True, min_width=None if narrow else min(len(mode), 24))
        for field, label in LABELS.items():
            sizes = [getattr(report, field) for report in self.reports.values()]
            if any(sizes):
                table.add_row(label, *map(format_bytes, sizes), style="bold" if field in _DEPEND_ON_MODE else None)
        return table
