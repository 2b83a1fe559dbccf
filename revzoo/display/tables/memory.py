"""The memory of a training step as a table with one column for each mode."""

from dataclasses import dataclass

from rich.table import Table

from revzoo.analysis.report import LABELS, MemoryReport
from revzoo.display.tables.base import DottedName, Fitted, make_table
from revzoo.format import format_bytes

_DEPEND_ON_MODE = {LABELS[field] for field in ("after_forward_bytes", "activation_bytes", "peak_bytes")}


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
        if narrow:
            table.padding = 0  # seven columns fit 80 characters
        rows = {label: [getattr(report, field) for report in self.reports.values()] for field, label in LABELS.items()}
        cells = {label: list(map(format_bytes, sizes)) for label, sizes in rows.items() if any(sizes)}
        table.add_column("", min_width=max(DottedName(label).narrowest if narrow else len(label) for label in LABELS.values()))
        for mode, *sizes in zip(self.reports, *cells.values(), strict=True):
            heading = DottedName(f"{mode} *" if mode == self.current else mode, "right")
            least = max(heading.narrowest, *map(len, sizes)) if narrow else min(len(mode), 24)
            table.add_column(heading, justify="right", no_wrap=True, min_width=least, max_width=least if narrow else None)
        for label, sizes in cells.items():
            table.add_row(label, *sizes, style="bold" if label in _DEPEND_ON_MODE else None)
        return table
