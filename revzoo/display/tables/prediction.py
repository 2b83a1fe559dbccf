"""Predictions as a table for rich to print."""

from collections.abc import Iterable
from typing import Any

from rich.markup import escape
from rich.table import Table

from revzoo.display.tables.base import DottedName


def tabulate_predictions(rows: Iterable[dict[str, Any]]) -> Table:
    """Return a table of the most probable class of each input, and of those that follow.

    Args:
        rows: `input`, and `predictions` with `class` and `probability`, the most probable first.
    """
    table = Table()
    table.add_column("input")
    table.add_column("class", style="bold", overflow="fold")
    table.add_column("", justify="right", no_wrap=True)
    table.add_column("then", overflow="fold")
    for row in rows:
        first, *others = row["predictions"]
        then = ", ".join(f"{other['class']} {_format(other['probability'])}" for other in others)
        table.add_row(DottedName(row["input"]), escape(first["class"]), _format(first["probability"]), escape(then))
    return table


def _format(probability: float) -> str:
    return f"{100 * probability:.1f} %"
