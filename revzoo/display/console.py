"""Printing tables, and saying what is being done."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console, RenderableType
from rich.markup import escape

_WIDTH = 140  # columns, where the output is no terminal whose width is known, and COLUMNS does not say it


def print_renderable(renderable: RenderableType) -> None:
    """Print a table or a group of them to the standard output."""
    is_known = sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdecimal()  # which rich reads
    Console(highlight=False, width=None if is_known else _WIDTH).print(renderable)


def print_text(text: str) -> None:
    """Print lines of text; a terminal gets lines that end between words."""
    if sys.stdout.isatty():
        Console(highlight=False).print(text, markup=False)
    else:
        print(text)


@contextmanager
def show_status(what: str = "", *, shown: bool = True) -> Iterator[Callable[[str], object]]:
    """Show what is being done in a line that vanishes at the end of the block; yield a function that shows something else.

    Where the standard error is no terminal, or not `shown`, nothing is. Print results after the block: inside they would go to
    the standard error.
    """
    if not (shown and sys.stderr.isatty()):
        yield lambda what: None
        return
    with Console(stderr=True).status(escape(what)) as status:
        yield lambda what: status.update(escape(what))
