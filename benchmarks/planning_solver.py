"""The planner's searches: whether they are exact, how fast they are, and how the published additive knapsack compares.

Peaks and budgets are those of `revzoo.planning.solvers.schedule_totals.peak`, which `planning_network.py` compares with counted
steps.
"""

import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

from planning_chain import arbitrary, every_schedule, like_network, of_kinds, only, span

from revzoo.planning.solvers.knapsack import solve_knapsack
from revzoo.planning.solvers.problem import Problem
from revzoo.planning.solvers.schedule_totals import cost, peak
from revzoo.planning.solvers.timeline import minimize_peak, solve_timeline

PARTS = (0.1, 0.3, 0.5, 0.7, 0.9)  # of the range from the least possible peak to that of storing everything


def knapsack_beside_timeline(quick: bool) -> dict[str, Any]:
    """Plan random chains with both solvers and the same two modes, and with the timeline and all four modes too."""
    rng, count = random.Random(1), 10 if quick else 300
    chains = [like_network(rng, rng.randint(10, 24)) for _ in range(count)]
    parts = {str(part): _compare(chains, part) for part in PARTS}
    half = parts["0.5"]
    return {
        "chains": count,
        "parts": parts,
        "found": f"at half: knapsack uses {half['knapsack_used']:.1%} of the range, with the static baseline it goes over in "
        f"{half['static_over']:.0%} (mean {half['static_over_mean']:.1%}, worst {half['static_over_worst']:.1%}); "
        f"timeline uses {half['timeline_used']:.1%}, extra time {half['same_modes']:.3f} of the knapsack's with the same "
        f"modes, {half['all_modes']:.3f} with all",
        "met": half["all_modes"] <= 2 / 3 and half["timeline_over"] == 0,
    }


def _compare(chains: Sequence[Problem], part: float) -> dict[str, float]:
    used: dict[str, list[float]] = {"timeline": [], "knapsack": [], "static": []}
    prices: dict[str, int] = dict.fromkeys(("knapsack", "same_modes", "all_modes"), 0)
    for problem in chains:
        two = only(problem, ("store", "invert"))
        smallest, most = span(two)
        budget = smallest + int((most - smallest) * part)
        exact, all_modes, additive = solve_timeline(two, budget), solve_timeline(problem, budget), solve_knapsack(two, budget)
        static = solve_knapsack(two, budget, "static")
        assert exact is not None, "the budget is at least the smallest peak"
        assert all_modes is not None, "with more modes the smallest peak is no larger"
        assert static is not None, "what is kept is below the peak"
        used["timeline"].append((peak(two, exact) - two.fixed_bytes) / (budget - two.fixed_bytes))
        used["static"].append((peak(two, static) - two.fixed_bytes) / (budget - two.fixed_bytes))
        if additive is not None:  # else the peak of inverting everything is above the budget
            used["knapsack"].append((peak(two, additive) - two.fixed_bytes) / (budget - two.fixed_bytes))
            prices["knapsack"] += cost(two, additive)
            prices["same_modes"] += cost(two, exact)
            prices["all_modes"] += cost(problem, all_modes)
    over = [share - 1 for share in used["static"] if share > 1]
    return {
        "timeline_used": statistics.mean(used["timeline"]),
        "timeline_over": sum(share > 1 for share in used["timeline"]),
        "knapsack_used": statistics.mean(used["knapsack"]) if used["knapsack"] else 0.0,
        "knapsack_over": sum(share > 1 for share in used["knapsack"]),
        "knapsack_finds_none": len(chains) - len(used["knapsack"]),
        "static_over": len(over) / len(chains),
        "static_over_mean": statistics.mean(over) if over else 0.0,
        "static_over_worst": max(over, default=0.0),
        "same_modes": prices["same_modes"] / max(prices["knapsack"], 1),
        "all_modes": prices["all_modes"] / max(prices["knapsack"], 1),
    }


def more_budget(quick: bool) -> dict[str, Any]:
    """Over grids of budgets, count plans that are slower than a plan for a smaller budget, or above their own."""
    rng, chains, budgets = random.Random(2), 3 if quick else 40, 20 if quick else 60
    slower = over = plans = 0
    for _ in range(chains):
        problem = like_network(rng, rng.randint(10, 24))
        smallest, most = span(problem)
        before: int | None = None
        for i in range(budgets):
            budget = smallest + (most - smallest) * i // (budgets - 1)
            modes = solve_timeline(problem, budget)
            assert modes is not None
            price = cost(problem, modes)
            slower += before is not None and price > before
            over += peak(problem, modes) > budget
            before, plans = price, plans + 1
    text = f"{plans} plans for {chains} chains: {slower} slower than with less, {over} above their budget"
    return {"plans": plans, "slower": slower, "over_budget": over, "found": text, "met": slower == over == 0}


def brute_force(quick: bool) -> dict[str, Any]:
    """Compare the timeline with all schedules of random chains; cost and peak of its answers must be the best ones."""
    rng, count = random.Random(3), 60 if quick else 1000
    compared = different = schedules = longest = 0
    for i in range(count):
        problem = arbitrary(rng, 2 + i % 9, 300 if quick else 2500)
        every = sorted(every_schedule(problem))
        schedules, longest = schedules + len(every), max(longest, len(problem.units))
        sizes = [size for _, size in every]
        smallest = min(sizes)
        different += minimize_peak(problem)[0] != smallest or solve_timeline(problem, smallest - 1) is not None
        for budget in (smallest, *rng.choices(sizes, k=2)):
            modes = solve_timeline(problem, budget)
            best = next((price, size) for price, size in every if size <= budget)  # the cheapest, of these the lowest
            different += modes is None or (cost(problem, modes), peak(problem, modes)) != best
            compared += 1
    return {
        "chains": count,
        "longest": longest,
        "schedules": schedules,
        "compared": compared,
        "different": different,
        "found": f"{count} chains of up to {longest} units, {schedules} schedules, {compared} budgets: {different} different",
        "met": different == 0,
    }


def speed(quick: bool) -> dict[str, Any]:
    """Time the timeline on 100 steps x 4 modes."""
    steps, rounds = (12, 1) if quick else (100, 5)
    chains = {f"{kinds} kinds": of_kinds(random.Random(4), steps, kinds) for kinds in (2, steps)}
    timeline = {name: statistics.median(_time_timeline(problem) for _ in range(rounds)) for name, problem in chains.items()}
    return {
        "steps": steps,
        "timeline_seconds": timeline,
        "found": f"timeline, {steps} steps: " + ", ".join(f"{seconds:.2f} s ({name})" for name, seconds in timeline.items()),
        "met": max(timeline.values()) < 5,
    }


def _time_timeline(problem: Problem) -> float:
    smallest, most = span(problem)
    begin = time.perf_counter()
    solve_timeline(problem, (smallest + most) // 2)
    return time.perf_counter() - begin
