"""The memory of a training step as a table with one column for each mode."""

from dataclasses import dataclass

from rich.table import Table

from revzoo.analysis.report import LABELS, MemoryReport
from revzoo.display.tables.base import DottedName, make_table
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

    def __rich__(self) -> Table:
        caption = "Counted: every tensor."
        if len(self.reports) > 1:
            caption += " The mode changes the memory of activations only."
        table = make_table(title="Memory of a training step", caption=caption)
        table.padding = 0  # seven columns fit 80 characters
        rows = {label: [getattr(report, field) for report in self.reports.values()] for field, label in LABELS.items()}
        cells = {label: list(map(format_bytes, sizes)) for label, sizes in rows.items() if any(sizes)}
        table.add_column("", min_width=max(DottedName(label).narrowest for label in LABELS.values()))
        for mode, *sizes in zip(self.reports, *cells.values(), strict=True):
            heading = DottedName(f"{mode} *" if mode == self.current else mode, "right")
            width = max(heading.narrowest, *map(len, sizes))
            table.add_column(heading, justify="right", min_width=width, max_width=width)
        for label, sizes in cells.items():
            table.add_row(label, *sizes, style="bold" if label in _DEPEND_ON_MODE else None)
        return table
