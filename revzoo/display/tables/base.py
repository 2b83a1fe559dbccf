"""What the tables share."""

from rich.table import Table


def make_plain_table(title: str) -> Table:
    """Return an empty table of names and values, without lines."""
    table = Table(title=title, show_header=False, box=None, title_justify="left")
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    return table
