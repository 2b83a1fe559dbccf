"""The scores of each class as a table for rich to print."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from revzoo.display.tables.base import DottedName, fill, make_table

_SCORES = ("precision", "recall", "f1")


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


def _format(score: float | None) -> str:
    return "-" if score is None else f"{100 * score:.1f} %"
