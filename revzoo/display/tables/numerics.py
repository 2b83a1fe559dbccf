"""What rounding does to a model, as tables for rich to print."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from revzoo.analysis.numerics import LayerAlpha, NumericsReport, RebuiltState
from revzoo.display.tables.base import DottedName
from revzoo.format import format_ratio


def tabulate_numerics(title: str, report: NumericsReport) -> RenderableType:
    """Lay out the signal-to-noise ratio of every rebuilt state, alpha of every layer, and the summary.

    Args:
        title: what was measured.
        report: the figures.
    """
    tables = []
    if report.states:
        tables.append(_tabulate_states(report.states))
    if report.layers:
        tables.append(_tabulate_layers(report.layers))
    return Group(escape(title), *tables, escape(str(report)))


def _tabulate_states(states: Sequence[RebuiltState]) -> Table:
    table = Table(title="Signal-to-noise ratio of rebuilt states, in the order of forward")
    table.add_column("before")
    for heading in ("measured", "predicted"):
        table.add_column(heading, justify="right")
    for state in states:
        table.add_row(DottedName(state.name), format_ratio(state.snr), format_ratio(state.predicted_snr))
    return table


def _tabulate_layers(layers: Sequence[LayerAlpha]) -> Table:
    table = Table(title="alpha: the factor by which the inverse of a layer changes the signal-to-noise ratio")
    table.add_column("layer")
    table.add_column("", no_wrap=True)
    for heading in ("measured", "formula"):
        table.add_column(heading, justify="right")
    for layer in layers:
        formula = "" if layer.formula is None else f"{layer.formula:.3g}"
        table.add_row(DottedName(layer.name), escape(layer.kind), f"{layer.measured:.3g}", formula)
    return table
