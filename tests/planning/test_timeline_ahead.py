"""The search with look-ahead against every schedule there is, and the walk against sums done by hand."""

import random
from dataclasses import replace
from itertools import groupby, product

import pytest

from revzoo.planning.solvers.problem import Ahead, Option, Problem, Recovery, Unit
from revzoo.planning.solvers.schedule import cost, list_phase_peaks, peak
from revzoo.planning.solvers.timeline import find_schedule, minimize_peak, solve_timeline
from revzoo.runtime.mode import Mode


def step(k: int) -> Unit:
    """A step of 100 bytes with states of 10: its recovery leaves these 100, and within a run a rebuilt state."""
    store = Option(Mode.STORE, 100, (k,), 110, (120, 110), 0)

    def invert(left: int, released: tuple[int, ...]) -> Option:
        ahead = Ahead((130, 130), (125, 125), (135, 135), (165, 165), Recovery(left + 7, left, released))
        return Option(Mode.INVERT, 0, (), 10, (140, 140), 7, ahead=ahead)

    return Unit(f"step{k}", (k - 1, k) if k else (0,), (k,), (store, invert(110, (k + 1,))), invert(100, ()))


FOUR = Problem(tuple(step(k) for k in range(4)), dict.fromkeys(range(5), 10), 1000, 10, (3, 4), lookahead=1)


@pytest.mark.parametrize(
    ("modes", "bytes_"),
    [
        # Nothing is recovered beside step 0; step 1 is beside the first of the run, which keeps its pair; the rest is alike.
        ("iiii", [135, 165 + 100, 135 + 110, 135 + 110]),
        # Step 1 is recovered before the backward of step 2, which ends the run: its own state 2, and state 1 of the run.
        ("iisi", [135, 165 + 100, 10 + 120 + 110, 120 + 135 + 110]),
        # Step 2 is recovered first, and beside it step 0, which goes on holding its pair; step 3 comes before both.
        ("isis", [135, 20 + 110 + 100, 120 + 135 + 100, 120 + 20 + 110]),
        ("ssss", [120, 110 + 120, 220 + 120, 330 + 120]),
        ("sssi", [120, 110 + 120, 220 + 120, 330 + 140]),
    ],
)
def test_by_hand(modes, bytes_):
    phases = list_phase_peaks(FOUR, [{"s": "store", "i": "invert"}[mode] for mode in modes])
    assert [phase.bytes - 1000 for phase in reversed(phases) if phase.phase == "backward"] == bytes_


def test_without_look_ahead_nothing_of_it_counts():
    plain = replace(FOUR, lookahead=0)
    assert peak(plain, ["invert"] * 4) == 1140
    assert peak(FOUR, ["invert"] * 4) == 1265
    assert (minimize_peak(plain)[0], minimize_peak(FOUR)[0]) == (1140, 1265)


def random_problem(rng: random.Random, count: int) -> Problem:
    """A chain in which state k goes into unit k, state k + 1 comes out; some units drop nothing in some mode."""
    sizes = {state: rng.randint(1, 12) for state in range(count + 1)}
    units = []
    for k in range(count):
        pair = (k - 1, k) if k else (0,)

        def ahead(kept: int, released: tuple[int, ...], k: int = k) -> Ahead:
            parts = [rng.randint(kept, kept + 30) for _ in range(4)]
            left = rng.randint(0, 25)
            return Ahead(*((part + sizes[k], part) for part in parts), Recovery(left + rng.randint(0, 15), left, released))

        def option(mode: str, released: tuple[int, ...] = (), k: int = k) -> Option:
            kept = rng.randint(0, 30) if mode == "store" else 0
            kept_states = () if mode == "invert" or (mode == "store" and rng.random() < 0.3) else (k,)
            top = rng.randint(kept, kept + 30)
            drops = mode == "invert" or (mode == "recompute" and rng.random() < 0.8)
            return Option(
                Mode(mode),
                kept,
                kept_states,
                rng.randint(kept, kept + 20),
                (top + sizes[k], top),
                rng.randint(1, 9) * (mode != "store"),
                ahead=ahead(kept, released) if drops else None,
            )

        options = [option("store"), *[option("recompute")] * rng.randint(0, 1)]
        first = option("invert", (k, k + 1) if rng.random() < 0.1 else ()) if rng.random() < 0.8 else None
        units.append(Unit(f"u{k}", pair, (k,), (*options, option("invert", (k + 1,))) if first else tuple(options), first))
    run = rng.choice([None, None, 1, 2])
    return Problem(tuple(units), sizes, rng.randint(0, 20), rng.randint(0, 30), (count - 1, count), run, lookahead=1)


def all_schedules(problem: Problem) -> dict[tuple[str, ...], tuple[int, int]]:
    """Return (cost, peak) of every schedule whose runs are short enough: the rules once more, in another form."""
    menus = [[option.mode for option in unit.options] for unit in problem.units]
    longest = problem.max_invert_run or len(menus)
    return {modes: evaluate(problem, modes) for modes in product(*menus) if longest_run(modes) <= longest}


def longest_run(modes: tuple[str, ...]) -> int:
    return max((sum(1 for _ in run) for mode, run in groupby(modes) if mode == "invert"), default=0)


def evaluate(problem: Problem, modes: tuple[str, ...]) -> tuple[int, int]:
    def size(states):
        return sum(problem.sizes[state] for state in states)

    n, units = len(modes), problem.units
    begins = [modes[k] == "invert" and (k == 0 or modes[k - 1] != "invert") for k in range(n)]
    ends = [k > 0 and modes[k - 1] == "invert" != modes[k] for k in range(n)]
    chosen = [
        unit.first if begins[k] else next(option for option in unit.options if option.mode == modes[k])
        for k, unit in enumerate(units)
    ]
    kept, held, top = [problem.fixed_bytes], [set()], 0
    for k in range(n):
        closed = set(units[k].pair) - held[k] if ends[k] else set()
        own = set(chosen[k].kept_states) - held[k] - closed
        top = max(top, kept[k] + size(closed) + size(set(units[k].pair) - held[k] - closed) + chosen[k].forward_bytes)
        kept.append(kept[k] + size(closed | own) + chosen[k].kept_bytes)
        held.append(held[k] | closed | own)
    top = max(top, kept[n] + problem.loss_bytes + size(set(problem.pair_after) - held[n]))
    drops = [k for k in range(n) if chosen[k].ahead]
    for k in range(n):
        lower = max((d for d in drops if d < k), default=None)
        recovered = chosen[lower].ahead.recovery if lower is not None and k <= drops[-1] else None
        closed = set(units[k].pair) - held[k] if ends[k] else set()

        def need(parts, k=k, closed=closed):
            return kept[k] + size(closed) + parts[k in held[k] | closed]

        left, without = 0, closed
        if recovered is not None:
            gone = set(recovered.released)
            left = recovered.left_bytes
            if k == lower + 1:
                without = closed - gone
            else:
                left -= size(gone - held[lower + 1] - set(chosen[lower + 1].kept_states))
        if k not in drops:
            top = max(top, need(chosen[k].backward_bytes, closed=without) + left)
            continue
        ahead = chosen[k].ahead
        inside = modes[k] == "invert" and not begins[k]
        rest = ahead.paired_bytes if inside and recovered is not None and not recovered.released else ahead.after_bytes
        if recovered is None:
            phases = [need(chosen[k].backward_bytes)] if k == drops[-1] else [need(ahead.before_bytes), need(rest)]
        else:
            phases = [need(ahead.during_bytes) + recovered.peak_bytes, need(rest, closed=without) + left]
            phases.append(need(chosen[k].backward_bytes if k == drops[-1] else ahead.before_bytes))
        top = max(top, *phases)
    return sum(option.cost for option in chosen), top


@pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_equals_brute_force(count):
    rng, differ = random.Random(0), 0
    for i in range(count):
        problem = random_problem(rng, rng.choice([2, 3, 4, 5]) if i % 20 else 7)
        schedules = all_schedules(problem)
        for modes in rng.sample(list(schedules), min(5, len(schedules))):
            assert (cost(problem, modes), peak(problem, modes)) == schedules[modes]
        smallest, modes = minimize_peak(problem)
        every = sorted(schedules.values())
        assert (smallest, schedules[tuple(modes)][0]) == min((size, price) for price, size in every)
        assert solve_timeline(problem, smallest - 1) is None
        for budget in (smallest, *rng.choices([size for _, size in every], k=2)):
            best = next((price, size) for price, size in every if size <= budget)  # the cheapest, of these the lowest
            assert schedules[tuple(solve_timeline(problem, budget))] == best
        differ += minimize_peak(replace(problem, lookahead=0)) != (smallest, modes)
    assert differ > count / 3


def test_a_hundred_steps_of_two_kinds():
    """What the recovered unit leaves is part of a search state, and equal steps share it."""
    units = [step(k) for k in range(100)]
    dear = [replace(unit, options=(unit.options[0], replace(unit.options[1], cost=k % 2 + 1))) for k, unit in enumerate(units)]
    problem = replace(FOUR, units=tuple(dear), sizes=dict.fromkeys(range(101), 10), pair_after=(99, 100))
    least, _ = minimize_peak(problem)
    full = peak(problem, ["store"] * 100)
    prices = [cost(problem, solve_timeline(problem, least + (full - least) * part // 10)) for part in range(0, 11, 2)]
    assert prices == sorted(prices, reverse=True)
    assert prices[-1] == 0 < prices[-2]


def test_the_bound_changes_no_schedule(search_near_bound):
    rng, mixed = random.Random(2), 0
    for _ in range(6):
        problem = random_problem(rng, 6)
        least, _ = minimize_peak(problem)
        for budget in (least, least + 20, least + 60):
            schedule = search_near_bound(problem, budget)
            assert schedule == find_schedule(problem, budget)
            mixed += len(set(schedule.modes)) > 1
    assert mixed > 6
