"""What the tables share: names that wrap at dots, and layouts for narrow terminals."""

import re
from collections.abc import Callable, Iterator
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

_PIECE = re.compile(r"[^._/ -]*[._/ -]?")  # of a name: up to and with the character behind which a line may end
_ANY_WIDTH = 10_000


def make_plain_table(title: str) -> Table:
    """Return an empty table of names and values, without lines."""
    table = Table(title=title or None, show_header=False, box=None, title_justify="left")
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    return table


def make_table(narrow: bool = False, **settings: Any) -> Table:
    """Return an empty table; a narrow one has no lines between columns, and one blank."""
    if not narrow:
        return Table(**settings)
    return Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, **settings)


class DottedName:
    """A name such as stages.0.blocks.3.f, whose lines end behind dots, or behind other signs between words.

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


class Fitted:
    """A layout for wide terminals where it fits, with columns as narrow as they may be, else one for narrow terminals.

    Args:
        build: returns the layout; its argument says whether it is the narrow one.
    """

    def __init__(self, build: Callable[[bool], RenderableType]):
        self.build = build

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        wide, unlimited = self.build(False), options.update(max_width=_ANY_WIDTH)
        if isinstance(wide, Table):
            _keep_whole(wide, console, unlimited)
        needed = Measurement.get(console, unlimited, wide).minimum
        yield wide if needed <= options.max_width else self.build(True)


def _keep_whole(table: Table, console: Console, options: ConsoleOptions) -> None:
    """Give columns that do not wrap the width of their cells: rich would cut these where there are too many columns."""
    for column in table.columns:
        if column.no_wrap:
            widths = [Measurement.get(console, options, cell) for cell in (column.header, *column.cells)]
            head = widths[0].minimum if isinstance(column.header, DottedName) else widths[0].maximum
            column.min_width = max([head, column.min_width or 0, *(width.maximum for width in widths[1:])])
