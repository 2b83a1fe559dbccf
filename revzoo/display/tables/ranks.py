"""A plan for many ranks as tables for rich to print: what one of them holds and sends."""

from rich.console import Group, RenderableType
from rich.table import Table

from revzoo.display.tables.base import fill
from revzoo.format import format_bytes
from revzoo.planning.ranks.rank_plan import RankPlan


def tabulate_ranks(ranks: RankPlan) -> RenderableType:
    """Lay out what the rank with the largest shards holds besides activations, and what it sends in a training step."""
    held, where = ranks.held, " (on the host)" if ranks.division.offload else ""
    sizes = {
        f"weights{where}": held.weights,
        f"gradients{where}": held.gradients,
        "buffers": held.buffers,
        f"optimizer state{where}": held.optimizer.state,
        f"optimizer update{where}": held.optimizer.update,
        "gathered at once, at most": held.gathered,
    }
    own = fill(Table(), ("one rank holds", "bytes"), [(name, format_bytes(size)) for name, size in sizes.items()])
    return Group(f"{str(ranks.division).capitalize()}: each rank has its own batch.", own, _tabulate_collectives(ranks))


def _tabulate_collectives(ranks: RankPlan) -> RenderableType:
    """Lay out the collectives of the plan; those of each mode only where they differ."""
    if not ranks.collectives:
        return "Nothing is sent."
    same = all(collectives == ranks.collectives for collectives in ranks.collectives_of_modes.values())
    plans = {"every mode": ranks.collectives} if same else {"this plan": ranks.collectives, **ranks.collectives_of_modes}
    rows = [
        (name, kind, str(collective.calls), format_bytes(collective.bytes))
        for name, collectives in plans.items()
        for kind, collective in collectives.items()
    ]
    return fill(Table(), ("a training step in", "sends by", "calls", "bytes of a rank"), rows)
