"""A plan for many ranks as tables for rich to print: what one of them holds and sends."""

from collections.abc import Mapping

from rich.console import Group, RenderableType
from rich.table import Table

from revzoo.format import format_bytes
from revzoo.planning.ranks.rank_plan import RankPlan


def tabulate_ranks(ranks: RankPlan) -> RenderableType:
    """Lay out what the rank with the largest shards holds besides activations, and what it sends in a training step."""
    held, where = ranks.held, " (on the host)" if ranks.division.offload else ""
    return Group(
        f"{str(ranks.division).capitalize()}: each rank has its own batch.",
        _tabulate_bytes(
            "one rank holds",
            {
                f"weights{where}": held.weights,
                f"gradients{where}": held.gradients,
                "buffers": held.buffers,
                f"optimizer state{where}": held.optimizer.state,
                f"optimizer update{where}": held.optimizer.update,
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


def _tabulate_collectives(ranks: RankPlan) -> RenderableType:
    """Lay out the collectives of the plan; those of each mode only where they differ."""
    if not ranks.collectives:
        return "Nothing is sent."
    same = all(collectives == ranks.collectives for collectives in ranks.collectives_of_modes.values())
    rows = {"every mode": ranks.collectives} if same else {"this plan": ranks.collectives, **ranks.collectives_of_modes}
    table = Table()
    table.add_column("a training step in")
    table.add_column("sends by")
    table.add_column("calls", justify="right")
    table.add_column("bytes of a rank", justify="right")
    for name, collectives in rows.items():
        for kind, collective in collectives.items():
            table.add_row(name, kind, str(collective.calls), format_bytes(collective.bytes))
            name = ""
    return table
