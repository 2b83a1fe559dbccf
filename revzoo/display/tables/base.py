"""What the tables share: names that wrap at dots, and a layout for 80 columns."""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

_PIECE = re.compile(r"[^._/ -]*[._/ -]?")  # of a name: up to and with the character after which a line may end


def make_plain_table(title: str) -> Table:
    """Return an empty table of names and values, without lines."""
    table = Table(title=title or None, show_header=False, box=None, title_justify="left")
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    return table


def make_table(**settings: Any) -> Table:
    """Return an empty table for a terminal of 80 columns: no lines between columns, and one blank."""
    return Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, **settings)


def fill(table: Table, headings: Iterable[str], rows: Iterable[Sequence[Any]]) -> Table:
    """Return the table with a column of names, columns of numbers, which stay whole, and these rows."""
    for k, heading in enumerate(headings):
        table.add_column(heading, justify="right" if k else "left", no_wrap=k > 0)
    for row in rows:
        table.add_row(*row)
    return table


class DottedName:
    """A name such as stages.0.blocks.3.f, whose lines end after dots, or after other signs between words.

    Args:
        name: the name.
        justify: where short lines stand.
    """

    def __init__(self, name: str, justify: Any = "left"):
        self.name, self.justify = name, justify
        self.narrowest = max(len(piece.rstrip()) for piece in _PIECE.findall(name))  # columns that keep its pieces whole

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        lines = [""]
        for piece in _PIECE.findall(self.name):
            if lines[-1] and len(lines[-1] + piece.rstrip()) > options.max_width:
                lines.append("")
            lines[-1] += piece
        yield Text("\n".join(line.rstrip() for line in lines), justify=self.justify, overflow="fold")

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(self.narrowest, len(self.name))
