"""The tables of a plan for many ranks."""

from rich.console import Console

from revzoo.analysis.optimizer_step import OptimizerBytes
from revzoo.display.tables.plan import tabulate_ranks
from revzoo.planning.ranks.division import Division, RankBytes
from revzoo.planning.ranks.rank_copy import Collective
from revzoo.planning.ranks.rank_plan import RankPlan


def test_what_a_rank_holds_and_sends():
    held = RankBytes(3 << 30, 2 << 30, 1 << 20, OptimizerBytes(6 << 30, 5 << 20), 1 << 30)
    sent = {"all-gather": Collective(204, 20 << 30), "reduce-scatter": Collective(102, 10 << 30)}
    console = Console(width=80)
    with console.capture() as capture:
        console.print(tabulate_ranks(RankPlan(None, Division(64, "hybrid", 8), held, sent)))
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] or [line] for line in capture.get().splitlines()]
    assert lines[0] == ["64 ranks on 8 nodes, shard=hybrid: each rank has its own batch."]
    assert ["weights", "3.0 GiB"] in lines
    assert ["gathered at once, at most", "1.0 GiB"] in lines
    assert lines[-3:-1] == [["all-gather", "204", "20.0 GiB"], ["reduce-scatter", "102", "10.0 GiB"]]
