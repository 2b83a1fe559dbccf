"""Measure the planner: whether its bytes and its search are exact, what its plans save, and the figures of the paper.

    python benchmarks/planning.py                   all rows, about an hour on 2 CPU cores
    python benchmarks/planning.py --only front      one row
    python benchmarks/planning.py --quick           the same rows at toy size, in a minute

Prints one line for each row: the target and what was measured. Writes planning.json with the data behind every line (rows that
are in the file and not measured this time stay), and pictures for each network: the Pareto front, and the schedules and times
over batch sizes. Rows that are measured in seconds (speed, bound, revnet, reformer) need a machine with nothing else to do; the
others count bytes and FLOPs, and are the same everywhere.
"""

import argparse
import json
import re
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from planning_figure import plot_front, plot_schedules, plot_times
from planning_front import compare_with_plans, fronts, networks
from planning_network import planned_time, predicted_peaks, sweep
from planning_ordinary import draw_ordinary, measure_ordinary
from planning_solver import brute_force, knapsack_beside_timeline, more_budget, speed
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from runtime import describe_environment


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Args:
        what: what is measured.
        target: what the planner should reach.
        measure: returns plain data. Its "found" is the text of the line; its "met" says whether the target is met, or is None
            where there is no target. The argument `True` selects toy sizes.
        draw: writes pictures of the data into a folder.
    """

    what: str
    target: str
    measure: Callable[[bool], dict[str, Any]]
    draw: Callable[[dict[str, Any], Path], None] | None = None


def pareto(quick: bool) -> dict[str, Any]:
    """Return the points of all methods on each network, and how the baselines compare with plans."""
    results = {}
    for name, network, batch in networks(quick):
        points, problem = fronts(network, batch, quick)
        stored = next(point for point in points if point.method == "all stored")
        results[name] = {
            "stored": asdict(stored),
            "fixed_bytes": problem.fixed_bytes,
            "points": [
                {**asdict(point), "bytes_ratio": point.bytes / stored.bytes, "flops_ratio": point.flops / stored.flops}
                for point in points
            ],
            "baselines": compare_with_plans(points, problem),
        }
    beside = {f"{name}: {method}": each for name, net in results.items() for method, each in net["baselines"].items()}
    losses = [f"{method} ({' | '.join(each['beats_plans'])})" for method, each in beside.items() if each["beats_plans"]]
    wins = min(each["plan_is_better"] for each in beside.values())
    return {
        "networks": results,
        "found": f"better than plans: {'; '.join(losses) or 'none'}; of every baseline a plan beats at least {wins} points",
        "met": not losses and wins > 0,
    }


def draw_fronts(data: dict[str, Any], folder: Path) -> None:
    """Write a picture of each network's fronts."""
    for name, net in data["networks"].items():
        series: dict[str, list[tuple[int, float]]] = {}
        for point in net["points"]:
            decomposed = ", decomposed" if "decomposed" in point["setting"] else ""
            series.setdefault(f"{point['method']}{decomposed}", []).append(
                (net["fixed_bytes"] + point["bytes"], point["flops_ratio"])
            )
        plot_front(series, folder / f"front_{_slug(name)}.png", "FLOPs", f"Peak against FLOPs: {name}")


def draw_sweep(data: dict[str, Any], folder: Path) -> None:
    """Write figures 4 and 5 of a network."""
    plot_schedules(data["rows"], data["units"], folder / f"schedules_{_slug(data['network'])}.png")
    plot_times(data["rows"], folder / f"times_{_slug(data['network'])}.png")


def _slug(name: str) -> str:
    return re.sub(r"\W+", "_", name).strip("_").lower()


_PAPER = "figures 4 and 5, table 2, the mean of 100 iterations"
ROWS = {
    "peaks": Row(
        "predicted against counted peak, 200 random budgets over seven families",
        "within 2 % or 1 MiB, none over budget, at least 93 % of the budget used",
        predicted_peaks,
    ),
    "solvers": Row(
        "exact timeline against the paper's knapsack, 300 chains",
        "at most 2/3 of its extra time at half of the range",
        knapsack_beside_timeline,
    ),
    "monotone": Row("more budget", "never a slower plan, never a peak above the budget", more_budget),
    "brute": Row("timeline against brute force, 1000 chains of up to 10 units", "equal", brute_force),
    "speed": Row("timeline of 100 steps x 4 modes", "5 s", speed),
    "front": Row(
        "Pareto front (bytes, FLOPs) against all-inverted, checkpoint and activation_memory_budget",
        "dominated nowhere, and better than each somewhere",
        pareto,
        draw_fronts,
    ),
    "ordinary": Row(
        "Pareto fronts of ordinary networks against checkpoint per block and activation_memory_budget at every .05",
        "every point beaten or equalled, the points to be reached reached, counted never above predicted",
        measure_ordinary,
        draw_ordinary,
    ),
    "bound": Row("time of a planned step over the fractional bound", "at most 1.05", planned_time),
    "revnet": Row("RevNet-104 over batch sizes", _PAPER, partial(sweep, "revnet"), draw_sweep),
    "reformer": Row("the 12-layer Reformer over batch sizes", _PAPER, partial(sweep, "reformer"), draw_sweep),
}


def make_table(results: dict[str, dict[str, Any]]) -> Table:
    lines = Table(box=SIMPLE_HEAD, show_lines=True)
    for name in ("row", "what", "target", "measured", "seconds"):
        lines.add_column(name, justify="right" if name == "seconds" else "left", no_wrap=name == "row")
    for name, data in results.items():
        color = {True: "green", False: "red", None: "default"}[data["met"]]
        row = ROWS[name]
        lines.add_row(name, row.what, row.target, f"[{color}]{escape(data['found'])}[/]", f"{data['took_seconds']:.0f}")
    return lines


def make_sweep_table(data: dict[str, Any]) -> Table:
    """Return table 2 of the paper for a network."""
    lines = Table(title=f"{data['network']}: seconds per iteration and per sample", title_justify="left", box=SIMPLE_HEAD)
    kinds = ("stored", "inverted", "planned")
    for head in ("batch", *kinds, *(f"{kind} / sample" for kind in kinds), "speed-up"):
        lines.add_column(head, justify="right")
    for row in data["rows"]:
        keys = (*kinds, *(f"{kind}_per_sample" for kind in kinds), "speedup")
        lines.add_row(str(row["batch"]), *("-" if row[key] is None else f"{row[key]:.3f}" for key in keys))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    home = Path(__file__).parent / "results" / kind
    parser.add_argument("--only", nargs="+", choices=ROWS, metavar="ROW", default=list(ROWS), help=f"of {', '.join(ROWS)}")
    parser.add_argument("--out", type=Path, default=home, help=f"folder for planning.json and pictures (default: {home})")
    parser.add_argument("--quick", action="store_true", help="toy sizes, too small for the targets in seconds")
    args = parser.parse_args()
    torch.set_num_threads(1 if args.quick else 2)
    args.out.mkdir(parents=True, exist_ok=True)
    console, results = Console(width=None if sys.stdout.isatty() else 140), {}
    about, file = describe_environment(), args.out / "planning.json"
    rows = json.loads(file.read_text())["rows"] if file.is_file() else {}
    for name in args.only:
        with console.status(ROWS[name].what):
            begin = time.perf_counter()
            rows[name] = results[name] = ROWS[name].measure(args.quick)
            results[name] |= {"took_seconds": time.perf_counter() - begin, "commit": about["commit"]}
        if draw := ROWS[name].draw:
            draw(results[name], args.out)
        ordered = {row: rows[row] for row in ROWS if row in rows}
        file.write_text(json.dumps(about | {"rows": ordered}, indent=1) + "\n")
    sweeps = [make_sweep_table(results[name]) for name in ("revnet", "reformer") if name in results]
    console.print(make_table(results), *sweeps, about)


if __name__ == "__main__":
    main()
