"""What rounding does to a model, as tables for rich to print."""

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from revzoo.analysis.numerics import NumericsReport
from revzoo.display.tables.base import DottedName, fill
from revzoo.format import format_ratio


def tabulate_numerics(title: str, report: NumericsReport) -> RenderableType:
    """Lay out the signal-to-noise ratio of every rebuilt state, and the summary.

    Args:
        title: what was measured.
        report: the figures.
    """
    tables = []
    if report.states:
        table = Table(title="Signal-to-noise ratio of rebuilt states, in the order of forward")
        rows = [(DottedName(each.name), format_ratio(each.snr), format_ratio(each.predicted_snr)) for each in report.states]
        tables.append(fill(table, ("before", "measured", "predicted"), rows))
    return Group(escape(title), *tables, escape(str(report)))
