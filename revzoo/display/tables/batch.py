"""The search for a batch size as tables for rich to print."""

from rich.console import Group, RenderableType
from rich.table import Table

from revzoo.display.tables.base import fill
from revzoo.display.tables.plan import tabulate_plan
from revzoo.format import format_bytes
from revzoo.planning.batch import BatchPlan


def tabulate_batches(best: BatchPlan) -> RenderableType:
    """Return tables of the batch-size search: every size's predicted speed, and the best plan."""
    table = Table(title="Samples per second of the sizes tried; a dash means that it does not fit the budget")
    rows = []
    for row in best.rows:
        rates = ("-" if time is None else f"{row.batch / time:.4g}" for time in (row.planned, row.stored, row.inverted))
        rows.append((str(row.batch), *rates, format_bytes(row.peak_bytes)))
    fill(table, ("batch", "planned", "all stored", "all inverted", "peak of the plan"), rows)
    result = f"Batch {best.batch} is best: {best.samples_per_second:.4g} samples a second, measured."
    return Group(table, tabulate_plan(best.plan), result)
