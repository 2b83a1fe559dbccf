"""A plan for many ranks as tables for rich to print: what one of them holds and sends."""

from collections.abc import Mapping

from rich.console import Group, RenderableType
from rich.table import Table

from revzoo.format import format_bytes
from revzoo.planning.ranks.rank_plan import RankPlan


def tabulate_ranks(ranks: RankPlan) -> RenderableType:
    """Lay out what the rank with the largest shards holds besides activations, and what it sends in a training step."""
    held = ranks.held
    return Group(
        f"{str(ranks.division).capitalize()}: each rank has its own batch.",
        _tabulate_bytes(
            "one rank holds",
            {
                "weights": held.weights,
                "gradients": held.gradients,
                "buffers": held.buffers,
                "optimizer state": held.optimizer.state,
                "optimizer update": held.optimizer.update,
                "gathered at once, at most": held.gathered,
            },
        ),
        _tabulate_collectives(ranks),
    )


def _tabulate_bytes(title: str, sizes: Mapping[str, int]) -> Table:
    table = Table()
    table.add_column(title)
    table.add_column("bytes", justify="right")
    for name, size in sizes.items():
        table.add_row(name, format_bytes(size))
    return table


def _tabulate_collectives(ranks: RankPlan) -> Table:
    """Lay out the collectives of a training step."""
    table = Table()
    table.add_column("a training step sends by")
    table.add_column("calls", justify="right")
    table.add_column("bytes of a rank", justify="right")
    for kind, collective in ranks.collectives.items():
        table.add_row(kind, str(collective.calls), format_bytes(collective.bytes))
    return table
