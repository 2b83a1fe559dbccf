"""Predictions, and the scores of each class, as tables for rich to print."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table

from revzoo.display.tables.base import DottedName, fill, make_table

_SCORES = ("precision", "recall", "f1")


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


def tabulate_classes(classes: Sequence[Mapping[str, Any]], mean: Mapping[str, float | None]) -> Table:
    """Lay out the scores of a classifier.

    Args:
        classes: `class`, `examples` and scores (0 to 1) of each; None where a class has no such score.
        mean: of the scores.
    """
    rows = [(DottedName(row["class"]), f"{row['examples']:,}", *map(_format, map(row.get, _SCORES))) for row in classes]
    total = sum(row["examples"] for row in classes)
    rows.append(("mean of the classes", f"{total:,}", *map(_format, map(mean.get, _SCORES))))
    return fill(make_table(), ("class", "examples", *_SCORES), rows)


def _format(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"
