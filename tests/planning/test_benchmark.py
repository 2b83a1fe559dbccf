"""The benchmark of the planner runs; what it counts at toy size is exact, and its lower bound holds."""

import json
import math
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from matplotlib.figure import Figure
from torch import nn

from revzoo.display.style import MODE_COLORS
from revzoo.planning.solvers.problem import Option, Problem, Unit
from revzoo.planning.solvers.schedule import cost
from revzoo.planning.solvers.timeline import minimize_peak, solve_timeline
from revzoo.runtime.mode import Mode

FILE = Path(__file__).parents[2] / "benchmarks" / "planning.py"
MIB = 1 << 20
slow = pytest.mark.slow  # together the rows take about as long as all other tests of this folder
ROWS = ["peaks", "solvers", "monotone", "brute", "speed", "front", "ordinary", "bound", "revnet", "reformer"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("planning")
    command = [sys.executable, "-W", "error", str(FILE), "--quick", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert all(row in done.stdout for row in ROWS)
    assert "speed-up" in done.stdout
    return out


@pytest.fixture(scope="module")
def result(folder):
    return json.loads((folder / "planning.json").read_text())


@pytest.fixture(scope="module")
def rows(result):
    return result["rows"]


@slow
def test_result_says_where_and_how_it_was_measured(result):
    assert result["command"].startswith("python ")
    assert result["hardware"].keys() == {"cpu", "cores", "threads"}
    assert result["versions"].keys() == {"python", "torch", "revzoo"}
    assert list(result["rows"]) == ROWS


@slow
def test_pictures(folder):
    pictures = sorted(path.name for path in folder.glob("*.png"))
    assert pictures == [
        "front_bert.png",
        "front_resnet18.png",
        "front_revnet_digits_batch_2.png",
        "front_transformer_2_blocks.png",
        "schedules_reformer.png",
        "schedules_revnet.png",
        "times_reformer.png",
        "times_revnet.png",
    ]
    assert all((folder / name).read_bytes().startswith(b"\x89PNG") for name in pictures)


@slow
def test_peaks_are_as_predicted_and_within_every_budget(rows):
    plans = rows["peaks"]["plans"]
    assert len(plans) == 6
    assert all(plan["counted_bytes"] == plan["predicted_bytes"] <= plan["budget_bytes"] for plan in plans)
    assert len({plan["counted_bytes"] for plan in plans}) > 1


@slow
def test_searches(rows):
    assert rows["brute"]["compared"] == 180
    assert rows["brute"]["longest"] == 10
    assert rows["brute"]["schedules"] > 5000
    assert rows["brute"]["different"] == 0
    assert rows["monotone"]["plans"] == 60
    assert rows["monotone"]["slower"] == rows["monotone"]["over_budget"] == 0
    assert rows["speed"]["knapsack"]["network"]["gap"] == 0
    assert not any(items["over"] for items in rows["speed"]["knapsack"].values())


@slow
def test_timeline_beside_the_knapsack(rows):
    for part in rows["solvers"]["parts"].values():
        assert part["timeline_over"] == 0
        assert part["all_modes"] <= part["same_modes"] <= 1
        assert part["knapsack_used"] <= 1
    assert rows["solvers"]["parts"]["0.5"]["static_over"] > 0


@slow
def test_every_method_is_beside_the_plans(rows):
    networks = rows["front"]["networks"]
    assert list(networks) == ["transformer, 2 blocks", "revnet_digits, batch 2"]
    for net in networks.values():
        baselines = net["baselines"]
        assert {method: baseline["points"] for method, baseline in baselines.items()} == {
            "all inverted": 1,
            "checkpoint per block": 1,
            "checkpoint, segments": len({p["setting"] for p in net["points"] if p["method"] == "checkpoint, segments"}),
            "activation_memory_budget": 2,
        }
        for baseline in baselines.values():
            reached = [row for row in baseline["rows"] if row["planned_bytes"] is not None]
            assert all(row["planned_bytes"] <= row["bytes"] for row in reached)
        assert baselines["all inverted"]["beats_plans"] == []  # it is one of the schedules


@slow
def test_the_whole_budget_of_the_partitioner_is_the_stored_step(rows):
    """Cut for everything, the joint graph keeps and computes what eager autograd does; only statistics of norms differ."""
    for net in rows["front"]["networks"].values():
        point = next(p for p in net["points"] if (p["method"], p["setting"]) == ("activation_memory_budget", "1.0"))
        assert point["flops"] == net["stored"]["flops"]
        assert point["bytes"] == pytest.approx(net["stored"]["bytes"], rel=0.05)


@slow
def test_checkpoints_compute_more_than_storing_and_less_than_twice(rows):
    for net in rows["front"]["networks"].values():
        for point in net["points"]:
            if point["method"].startswith("checkpoint"):
                assert 1 < point["flops_ratio"] < 4 / 3 + 1e-9
                assert point["activation_bytes"] < net["stored"]["activation_bytes"]


@slow
@pytest.mark.parametrize(("name", "network"), [("revnet", "RevNet"), ("reformer", "Reformer")])
def test_the_papers_table(rows, name, network):
    swept, stored = rows[name], 3
    assert (swept["network"], swept["largest_stored"], swept["iterations"]) == (network, stored, 5)
    assert [row["batch"] for row in swept["rows"]] == list(range(2, swept["rows"][-1]["batch"] + 1))
    assert swept["rows"][-1]["batch"] > stored
    assert swept["mean_seconds"] > 0 < swept["standard_error"]
    for row in swept["rows"]:
        assert row["peak_bytes"] <= swept["budget_bytes"]
        assert row["planned_per_sample"] == row["planned"] / row["batch"]
        assert len(row["schedule"]) == len(swept["units"])
        assert (row["stored"] is None) == (row["batch"] > stored)


@slow
def test_fronts_of_ordinary_networks_stand_beside_rivals(rows):
    networks = rows["ordinary"]["networks"]
    assert list(networks) == ["resnet18", "bert"]
    for network in networks.values():
        assert network["points"][-1][1] == 1.0
        assert all(each["counted_bytes"] <= each["predicted_bytes"] for each in network["counted"])
        budget = "activation_memory_budget"
        methods = [(row["method"], row["setting"]) for row in network["rivals"]]
        assert [method for method, _ in methods] == ["checkpoint per block", budget, budget]
        for row in network["rivals"]:
            assert row["plan_is_as_good"] == (row["planned_flops"] is not None and row["planned_flops"] <= row["flops"])
            assert row["planned_fraction"] is None or row["planned_fraction"] <= row["fraction"]
        assert network["rivals"][0]["flops"] > 1.3


@slow
def test_bound(rows):
    assert [row["part"] for row in rows["bound"]["rows"]] == [0.3, 0.5, 0.7]
    assert all(row["ratio"] > 0 and row["bound_seconds"] >= 0 for row in rows["bound"]["rows"])


@pytest.fixture
def benchmarks(monkeypatch) -> None:
    """Let the files of the benchmarks be imported as they import each other."""
    monkeypatch.syspath_prepend(FILE.parent)
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith("planning_"):
            del sys.modules[name]


def step(k: int) -> Unit:
    """Return a step that stores 100 bytes and its input of 10 bytes, or inverts at a cost of 7."""
    store = Option(Mode.STORE, 100, (k,), 110, (120, 110), 0)
    invert = Option(Mode.INVERT, 0, (), 10, (140,) * 2, 7)
    return Unit(f"step{k}", (k - 1, k) if k else (0,), (k,), (store, invert), invert)


def test_the_bound_of_three_steps_by_hand(benchmarks):
    """Stored steps weigh 110; in front of the loss 1280 - 1010 = 270 fit, 170 of them on steps 0 and 1."""
    from planning_bound import fractional_bound

    three = Problem(tuple(map(step, range(3))), dict.fromkeys(range(4), 10), 1000, 10, (2, 3))
    assert fractional_bound(three, 1280) == pytest.approx(21 - 7 * 270 / 110, rel=1e-15)
    assert fractional_bound(three, 1350) == 0
    assert fractional_bound(three, 1109) == math.inf


def test_no_schedule_costs_less_than_the_bound(benchmarks):
    from planning_bound import fractional_bound
    from planning_chain import arbitrary

    rng, above_zero = random.Random(0), 0
    for i in range(150):
        problem = arbitrary(rng, 2 + i % 9, 300)
        smallest, _ = minimize_peak(problem)
        for budget in (smallest, smallest + rng.randint(0, 60)):
            bound = fractional_bound(problem, budget)
            assert bound <= cost(problem, solve_timeline(problem, budget))
            above_zero += bound > 0
    assert above_zero > 75


def test_the_partitioner_keeps_the_loss_too(benchmarks):
    """With the whole budget, of a network whose forward has nothing to spare, both count the same step."""
    from ordinary_networks import Network
    from planning_ordinary import measure_network

    network = Network(lambda: nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)), lambda: torch.zeros(5, 8), "0")
    data = measure_network(network, (1.0,))
    (point,) = (row for row in data["rivals"] if row["method"] == "activation_memory_budget")
    hidden, loss = 4 * 5 * 16, 2 * 4  # tanh's gradient: two gradients beside its result
    assert data["stored_bytes"] == 3 * hidden + loss
    assert (point["fraction"], point["flops"], point["plan_is_as_good"]) == (1.0, 1.0, True)


def test_searches_at_toy_size(benchmarks):
    from planning_solver import knapsack_beside_timeline, more_budget

    more = more_budget(True)
    assert (more["plans"], more["slower"], more["over_budget"]) == (60, 0, 0)
    parts = knapsack_beside_timeline(True)["parts"]
    assert all(part["timeline_over"] == 0 and part["all_modes"] <= part["same_modes"] <= 1 for part in parts.values())
    assert parts["0.5"]["static_over"] > 0


def test_the_picture_of_a_front(benchmarks, tmp_path, monkeypatch):
    """The plans are a step line, every other schedule a point of its own look; the picture repeats byte for byte."""
    from planning_figure import plot_front

    figures, save = [], Figure.savefig

    def save_and_keep(figure: Figure, *args, **options) -> None:
        figures.append(figure)
        save(figure, *args, **options)

    monkeypatch.setattr(Figure, "savefig", save_and_keep)
    series = {
        "planned": [(30 * MIB, 1.2), (20 * MIB, 1.3), (40 * MIB, 1.0)],
        "all inverted": [(25 * MIB, 1.4)],
        "checkpoint per block": [(50 * MIB, 1.1), (35 * MIB, 1.5)],
    }
    for name in ("front.png", "again.png"):
        plot_front(series, tmp_path / name, cost="FLOPs", title="A title")
    picture = (tmp_path / "front.png").read_bytes()
    assert picture == (tmp_path / "again.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    (axes,) = figures[0].axes
    assert {line.get_label(): [*zip(*line.get_data(), strict=True)] for line in axes.lines} == {
        label: sorted(points) for label, points in series.items()
    }
    planned, inverted, _ = axes.lines
    assert planned.get_drawstyle() == "steps-post"
    assert (inverted.get_linestyle(), inverted.get_color()) == ("None", MODE_COLORS["invert"])
    assert axes.get_ylabel() == "FLOPs of a step, all stored = 1"
    assert "A title" in [text.get_text() for text in figures[0].texts]
    ticks = [axes.xaxis.get_major_formatter()(tick) for tick in axes.get_xticks()]
    assert ticks == ["20 MiB", "25 MiB", "30 MiB", "35 MiB", "40 MiB", "45 MiB", "50 MiB"]
