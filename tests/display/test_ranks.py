"""The tables of a plan for many ranks."""

import pytest
from rich.console import Console

from revzoo.analysis.optimizer_step import OptimizerBytes
from revzoo.display.tables.plan import tabulate_ranks
from revzoo.planning.ranks.division import Division, RankBytes
from revzoo.planning.ranks.rank_copy import Collective
from revzoo.planning.ranks.rank_plan import RankPlan

GATHER, REDUCE = {"all-gather": Collective(204, 20 << 30)}, {"reduce-scatter": Collective(102, 10 << 30)}


@pytest.fixture
def show():
    """Return a function that prints what ranks hold and send, in 80 columns, as cells of lines."""

    def show(collectives, collectives_of_modes):
        held = RankBytes(3 << 30, 2 << 30, 1 << 20, OptimizerBytes(6 << 30, 5 << 20), 1 << 30)
        ranks = RankPlan(None, Division(64, "hybrid", 8), held, collectives, collectives_of_modes)
        console = Console(width=80)
        with console.capture() as capture:
            console.print(tabulate_ranks(ranks))
        lines = capture.get().splitlines()
        assert max(map(len, lines)) <= 80
        return [[cell.strip() for cell in line.split("│")[1:-1]] or [line] for line in lines]

    return show


def test_what_every_mode_sends_stands_once(show):
    both = {**GATHER, **REDUCE}
    lines = show(both, dict.fromkeys(("store", "invert"), both))
    assert lines[0] == ["64 ranks on 8 nodes, shard=hybrid: each rank has its own batch."]
    assert ["weights", "3.0 GiB"] in lines
    assert ["gathered at once, at most", "1.0 GiB"] in lines
    assert lines[-3:-1] == [
        ["every mode", "all-gather", "204", "20.0 GiB"],
        ["every mode", "reduce-scatter", "102", "10.0 GiB"],
    ]


def test_modes_that_send_something_else_stand_by_themselves(show):
    lines = show(GATHER, {"store": GATHER, "invert": REDUCE})
    assert [cells[0] for cells in lines[-4:-1]] == ["this plan", "store", "invert"]


def test_one_rank_sends_nothing(show):
    assert show({}, {"store": {}})[-1] == ["Nothing is sent."]
