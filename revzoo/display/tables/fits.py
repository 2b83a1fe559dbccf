"""What fits a card, as a table: a row for each way to run a training step."""

from rich.console import Group
from rich.markup import escape

from revzoo.display.tables.base import fill, make_table
from revzoo.format import format_bytes
from revzoo.planning.card import Fits, Method

_YES_NO = {True: "[green]yes[/]", False: "[red]no[/]"}


def tabulate_fits(answer: Fits) -> Group:
    """Lay out every method with what it keeps and takes, whether it fits, its work, and the largest batch or longest text."""
    largest = {"batch": "largest batch", "tokens": "longest text"}[answer.unit]
    headings = "training step", "kept for backward", "peak", "fits", "work", largest
    rows = [_list_cells(answer, method) for method in answer.methods if not method.problem]
    table = fill(make_table(), headings, rows)
    problems = [escape(f"{method.name}: not counted. {method.problem}.") for method in answer.methods if method.problem]
    return Group(table, *problems, f"A step may take {format_bytes(answer.limit_bytes)}, nine tenths of {answer.card}.")


def _list_cells(answer: Fits, method: Method) -> tuple[str, ...]:
    sizes = format_bytes(method.kept_bytes), format_bytes(method.peak_bytes)
    return method.name, *sizes, _YES_NO[answer.does_fit(method)], f"{method.work:.2f}", f"{method.largest:,}"
