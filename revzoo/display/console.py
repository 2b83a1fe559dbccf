"""Printing tables, and saying what is being done."""

import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from rich.console import Console, RenderableType
from rich.markup import escape

_WIDTH = 140  # columns, where the output is no terminal whose width is known, and COLUMNS does not say it
TELL_SECONDS = 10.0  # between two lines where there is no terminal


def print_renderable(renderable: RenderableType) -> None:
    """Print a table or a group of them to the standard output."""
    is_known = sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdecimal()  # which rich reads
    Console(highlight=False, width=None if is_known else _WIDTH).print(renderable)


def print_result(data: object, table: RenderableType, *, as_json: bool) -> None:
    """Print data as JSON, or the table of them."""
    if as_json:
        print(json.dumps(data, indent=2))
    else:
        print_renderable(table)


def print_text(text: str) -> None:
    """Print lines of text; a terminal gets lines that end between words."""
    if sys.stdout.isatty():
        Console(highlight=False).print(text, markup=False)
    else:
        print(text)


@contextmanager
def show_status(what: str = "", *, shown: bool = True) -> Iterator[Callable[[str], object]]:
    """Show what is being done until the end of the block; yield a function that shows something else.

    On a terminal it is a line that vanishes, elsewhere one that is printed every ten seconds, on the standard error. Where not
    `shown`, it is nothing. Print results after the block: inside they would go to the standard error.
    """
    if not shown:
        yield lambda what: None
    elif sys.stderr.isatty():
        with Console(stderr=True).status(escape(what)) as status:
            yield lambda what: status.update(escape(what))
    else:
        doing, ended = [what], threading.Event()
        teller = threading.Thread(target=_tell, args=(doing, ended), daemon=True)
        teller.start()
        try:
            yield partial(doing.__setitem__, 0)
        finally:
            ended.set()
            teller.join()


def _tell(doing: list[str], ended: threading.Event) -> None:
    while not ended.wait(TELL_SECONDS):
        print(f"{doing[0]} ...", file=sys.stderr, flush=True)
