"""What the planner's searches reach: exactness, speed, and the published additive knapsack beside them.

Peaks and budgets are those of `revzoo.planning.solvers.problem.peak`, which `planning_network.py` compares with counted steps.
"""

import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from planning_chain import arbitrary, every_schedule, like_network, of_kinds, only, span

from revzoo.planning.solvers.knapsack import choose_subset, solve_knapsack
from revzoo.planning.solvers.problem import Problem, cost, peak
from revzoo.planning.solvers.timeline import minimize_peak, solve_timeline

PARTS = (0.1, 0.3, 0.5, 0.7, 0.9)  # of the range from the least possible peak to that of storing everything


def knapsack_beside_timeline(quick: bool) -> dict[str, Any]:
    """Plan random chains with both solvers, with the same two modes, and the timeline with all four too."""
    rng, count = random.Random(1), 10 if quick else 300
    chains = [like_network(rng, rng.randint(10, 24)) for _ in range(count)]
    parts = {str(part): _beside(chains, part) for part in PARTS}
    half = parts["0.5"]
    return {
        "chains": count,
        "parts": parts,
        "found": f"at half: knapsack uses {half['knapsack_used']:.1%} of the range, read as static it goes over in "
        f"{half['static_over']:.0%} (mean {half['static_over_mean']:.1%}, worst {half['static_over_worst']:.1%}); "
        f"timeline uses {half['timeline_used']:.1%}, extra time {half['same_modes']:.3f} of the knapsack's with the same "
        f"modes, {half['all_modes']:.3f} with all",
        "met": half["all_modes"] <= 2 / 3 and half["timeline_over"] == 0,
    }


def _beside(chains: Sequence[Problem], part: float) -> dict[str, float]:
    used: dict[str, list[float]] = {"timeline": [], "knapsack": [], "static": []}
    prices: dict[str, int] = dict.fromkeys(("knapsack", "same_modes", "all_modes"), 0)
    for problem in chains:
        two = only(problem, ("store", "invert"))
        least, most = span(two)
        budget = least + int((most - least) * part)
        exact, ours, theirs = solve_timeline(two, budget), solve_timeline(problem, budget), solve_knapsack(two, budget, "peak")
        static = solve_knapsack(two, budget, "static")
        assert exact is not None, "the least peak is in reach"
        assert ours is not None, "with more modes too"
        assert static is not None, "what is kept is below the peak"
        used["timeline"].append((peak(two, exact) - two.fixed_bytes) / (budget - two.fixed_bytes))
        used["static"].append((peak(two, static) - two.fixed_bytes) / (budget - two.fixed_bytes))
        if theirs is not None:  # the peak of inverting everything is above the budget
            used["knapsack"].append((peak(two, theirs) - two.fixed_bytes) / (budget - two.fixed_bytes))
            prices["knapsack"] += cost(two, theirs)
            prices["same_modes"] += cost(two, exact)
            prices["all_modes"] += cost(problem, ours)
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
    """Count plans that are slower than one for less, or above their budget, over grids of budgets."""
    rng, chains, budgets = random.Random(2), 3 if quick else 40, 20 if quick else 60
    slower = over = plans = 0
    for _ in range(chains):
        problem = like_network(rng, rng.randint(10, 24))
        least, most = span(problem)
        before: int | None = None
        for i in range(budgets):
            budget = least + (most - least) * i // (budgets - 1)
            modes = solve_timeline(problem, budget)
            assert modes is not None
            price = cost(problem, modes)
            slower += before is not None and price > before
            over += peak(problem, modes) > budget
            before, plans = price, plans + 1
    found = f"{plans} plans for {chains} chains: {slower} slower than with less, {over} above their budget"
    return {"plans": plans, "slower": slower, "over_budget": over, "found": found, "met": slower == over == 0}


def brute_force(quick: bool) -> dict[str, Any]:
    """Compare the timeline with all schedules of random chains; cost and peak of its answers must be the best ones."""
    rng, count = random.Random(3), 60 if quick else 1000
    compared = different = schedules = longest = 0
    for i in range(count):
        problem = arbitrary(rng, 2 + i % 9, 300 if quick else 2500)
        every = sorted(every_schedule(problem))
        schedules, longest = schedules + len(every), max(longest, len(problem.units))
        sizes = [size for _, size in every]
        least = min(sizes)
        different += minimize_peak(problem)[0] != least or solve_timeline(problem, least - 1) is not None
        for budget in (least, *rng.choices(sizes, k=2)):
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
    """Time the knapsack on 200 items, as networks produce them and adversarial, and the timeline on 100 steps x 4 modes."""
    items, steps, rounds = (16, 12, 1) if quick else (200, 100, 5)
    found = {name: _knapsack(make, items, rounds) for name, make in _ITEMS.items()}
    chains = {f"{kinds} kinds": of_kinds(random.Random(4), steps, kinds) for kinds in (2, steps)}
    timeline = {name: statistics.median(_timeline(problem) for _ in range(rounds)) for name, problem in chains.items()}
    network, hard = found["network"], [each for name, each in found.items() if name != "network"]
    return {
        "items": items,
        "knapsack": found,
        "steps": steps,
        "timeline_seconds": timeline,
        "found": f"knapsack, {items} items: gap {network['gap']:g} in {network['seconds']:.3f} s; adversarial: gap at most "
        f"{max(each['gap'] for each in hard):.1e}, {sum(each['over'] for each in hard)} over capacity, in at most "
        f"{max(each['seconds'] for each in hard):.2f} s; timeline, {steps} steps: "
        + ", ".join(f"{seconds:.2f} s ({name})" for name, seconds in timeline.items()),
        "met": network["gap"] == 0
        and not any(each["over"] for each in found.values())
        and network["seconds"] < 1
        and max(timeline.values()) < 5,
    }


def _from_network(rng: random.Random, items: int) -> tuple[list[int], list[int]]:
    """Twelve kinds of steps, of which each has one size and one time."""
    kinds = [(rng.randint(10**5, 2 * 10**7), rng.randint(10**7, 2 * 10**9)) for _ in range(12)]
    chosen = rng.choices(kinds, k=items)
    return [value for value, _ in chosen], [weight for _, weight in chosen]


def _correlated(rng: random.Random, items: int) -> tuple[list[int], list[int]]:
    weights = [rng.randint(10**7, 2 * 10**9) for _ in range(items)]
    return [weight // 100 + 10**6 for weight in weights], weights


def _subset_sum(rng: random.Random, items: int) -> tuple[list[int], list[int]]:
    weights = [rng.randint(10**7, 2 * 10**9) for _ in range(items)]
    return weights, weights


_ITEMS: dict[str, Callable[[random.Random, int], tuple[list[int], list[int]]]] = {
    "network": _from_network,
    "strongly correlated": _correlated,
    "subset sum": _subset_sum,
}


def _knapsack(make: Callable[[random.Random, int], tuple[list[int], list[int]]], items: int, rounds: int) -> dict[str, float]:
    gaps, seconds, over = [], [], 0
    for seed in range(rounds):
        values, weights = make(random.Random(seed), items)
        capacity = min(10**11, sum(weights) // 2)
        begin = time.perf_counter()
        solution = choose_subset(values, weights, capacity)
        seconds.append(time.perf_counter() - begin)
        gaps.append(solution.gap)
        over += sum(weights[i] for i in solution.chosen) > capacity
    return {"gap": max(gaps), "seconds": statistics.median(seconds), "worst_seconds": max(seconds), "over": over}


def _timeline(problem: Problem) -> float:
    least, most = span(problem)
    begin = time.perf_counter()
    solve_timeline(problem, (least + most) // 2)
    return time.perf_counter() - begin
