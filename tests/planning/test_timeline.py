"""The search over schedules against every schedule there is, and the walk against sums done by hand."""

import random
from dataclasses import replace

import pytest

from revzoo.planning.solvers import timeline
from revzoo.planning.solvers.problem import Option, Problem, Unit
from revzoo.planning.solvers.schedule_totals import PhasePeak, cost, list_phase_peaks, peak
from revzoo.planning.solvers.timeline import find_schedule, minimize_peak, solve_timeline
from revzoo.runtime.mode import Mode


def step(k: int, store: int, extra: int, state: int = 10) -> Unit:
    """A step of size `store` with states of 10 bytes: state k in, state k + 1 out; the rebuilt pair is alive in backward."""
    store_option = Option(Mode.STORE, store, (k,), store + state, (store + 2 * state, store + state), 0)
    invert = Option(Mode.INVERT, 0, (), state, (store + 4 * state,) * 2, extra)
    return Unit(f"step{k}", (k - 1, k) if k else (0,), (k,), (store_option, invert), invert)


THREE = Problem(tuple(step(k, 100, 7) for k in range(3)), dict.fromkeys(range(4), 10), 1000, 10, (2, 3))


def test_every_phase_of_three_steps():
    """By hand: step 0 keeps 100 + state 0, the run of steps 1 and 2 keeps the pair behind it."""
    assert list_phase_peaks(THREE, ["store", "invert", "invert"]) == [
        PhasePeak("step0", "forward", 1000 + 10 + 110),
        PhasePeak("step1", "forward", 1000 + 110 + 10 + 10),  # state 0 is kept, state 1 is not
        PhasePeak("step2", "forward", 1000 + 110 + 20 + 10),
        PhasePeak("loss", "loss", 1000 + 110 + 20 + 10),
        PhasePeak("step2", "backward", 1000 + 110 + 140),
        PhasePeak("step1", "backward", 1000 + 110 + 140),
        PhasePeak("step0", "backward", 1000 + 120),
    ]
    assert cost(THREE, ["store", "invert", "invert"]) == 14


@pytest.mark.parametrize(
    ("modes", "bytes_"),
    [
        ("iii", 1000 + 140),
        ("iis", 1000 + 20 + 10 + 100 + 10),  # the run keeps states 1 and 2, of which the last step is given one
        ("isi", 1000 + 20 + 100 + 140),  # states 0 and 1, the stored step, the rebuilt pair
        ("sii", 1000 + 110 + 140),
        ("sss", 1000 + 330 + 10 + 10),  # state 3 is there at the loss
    ],
)
def test_what_is_stored_last_is_almost_free(modes, bytes_):
    """By hand: all three schedules that store one of three equal steps keep its 100 bytes, but not at the same time."""
    assert peak(THREE, [{"s": "store", "i": "invert"}[mode] for mode in modes]) == bytes_


def test_stored_steps_belong_last():
    assert minimize_peak(THREE) == (1140, ["invert", "invert", "store"])
    assert solve_timeline(THREE, 1139) is None
    assert solve_timeline(THREE, 1249) == ["invert", "invert", "store"]
    assert cost(THREE, solve_timeline(THREE, 1250)) == cost(THREE, solve_timeline(THREE, 1349)) == 7
    assert solve_timeline(THREE, 1350) == ["store", "store", "store"]


def test_a_run_is_as_long_as_allowed():
    short = Problem(THREE.units, THREE.sizes, 1000, 10, (2, 3), max_invert_run=1)
    least, modes = minimize_peak(short)
    assert (least, modes.count("invert")) == (1250, 1)  # 2 x 100, the states 0 and 1 or 1 and 2 of the run, 10, the loss
    assert peak(short, ["invert"] * 3) == 1140
    assert minimize_peak(Problem(THREE.units, THREE.sizes, 1000, 10, (2, 3), max_invert_run=0)) == (1350, ["store"] * 3)


@pytest.mark.parametrize(
    ("modes", "message"),
    [
        (["store", "keep", "store"], "Unit 'step1' has the modes store, invert here. Received: 'keep'."),
        (["store"], "A schedule has one mode per unit: 3. Received: 1."),
    ],
)
def test_a_schedule_that_does_not_fit_is_refused(modes, message):
    with pytest.raises(ValueError, match=message):
        peak(THREE, modes)


def test_a_step_that_cannot_begin_a_run_may_go_on_with_one():
    last = Unit("last", (1, 2), (2,), THREE.units[2].options, None)
    problem = Problem((*THREE.units[:2], last), THREE.sizes, 1000, 10, (2, 3))
    assert cost(problem, ["store", "invert", "invert"]) == 14
    with pytest.raises(ValueError, match="Unit 'last' has the modes store here"):
        cost(problem, ["store", "store", "invert"])
    with pytest.raises(ValueError, match="allowed there"):
        minimize_peak(Problem((Unit("last", (0,), (0,), THREE.units[0].options[1:], None),), {0: 1}, 0, 0, ()))


def random_problem(rng: random.Random, count: int, modes: int = 4) -> Problem:
    """A chain as models are: state k goes into unit k, state k + 1 comes out; nodes may join the two streams."""
    sizes = {state: rng.randint(1, 12) for state in range(count + 1)}
    units = []
    for k in range(count):
        older = max(k - 1, 0)
        node = rng.random() < 0.25
        inputs = (older, k) if node and k and rng.random() < 0.6 else (k,)
        pair = (older, k) if k else (0,)

        def option(mode, cheap, inputs=inputs, k=k):
            kept = 0 if mode in ("recompute", "invert") else rng.randint(0, 30) // (1 + (mode == "selective"))
            kept_states = () if mode == "invert" else (*inputs, k + 1) if rng.random() < 0.2 else inputs
            rare = rng.randint(1, 3) if mode == "invert" and rng.random() < 0.1 else 0
            top = rng.randint(kept, kept + 30)
            known = [sum(sizes[s] for j, s in enumerate(inputs) if not i >> j & 1) for i in range(2 ** len(inputs))]
            extra = 0 if cheap else rng.randint(1, 9)
            return Option(
                Mode(mode), kept + rare, kept_states, rng.randint(kept, kept + 20), tuple(top + more for more in known), extra
            )

        names = ["store", *rng.sample(["selective", "recompute"], rng.randint(0, max(modes - 2, 0)))]
        inverts = not node and rng.random() < 0.8
        options = [option(mode, mode == "store") for mode in names[: modes - inverts]]
        first = option("invert", False) if inverts else None
        units.append(Unit(f"u{k}", pair, inputs, (*options, option("invert", False)) if first else tuple(options), first))
    run = rng.choice([None, None, 0, 1, 2, 3])
    return Problem(tuple(units), sizes, rng.randint(0, 20), rng.randint(0, 30), (count - 1, count), run)


def all_schedules(problem: Problem) -> dict[tuple[str, ...], tuple[int, int]]:
    """Return (cost, peak) of every schedule whose runs are short enough: the rules once more, in another form."""
    schedules = {}

    def size(states):
        return sum(problem.sizes[state] for state in states)

    def go_on(modes, kept, held, run, price, top, left=0):
        k = len(modes)
        end = k == len(problem.units)
        pair = problem.pair_after if end else problem.units[k].pair
        ended = kept + size(set(pair) - held), held | set(pair)
        if end:
            schedules[modes] = price, max(top, ended[0] + problem.loss_bytes + left * problem.is_left_at_loss)
            return
        unit = problem.units[k]
        for option in unit.options:
            S, H = kept, held
            if option.mode == "invert":
                option = option if run else unit.first
                if option is None or run == problem.max_invert_run:
                    continue
            elif run:
                S, H = ended
            mask = [state in H for state in (*unit.inputs, None)]
            forward = S + left + size(set(pair) - H) + option.forward_bytes
            backward = S + option.backward_bytes[mask[0] + 2 * mask[1]]
            after = S + option.kept_bytes + size(set(option.kept_states) - H)
            inverted = run + 1 if option.mode == "invert" else 0
            rest = price + option.cost, max(top, forward, backward)
            go_on((*modes, option.mode), after, H | set(option.kept_states), inverted, *rest, left + option.left_bytes)

    go_on((), problem.fixed_bytes, frozenset(), 0, 0, 0)
    return schedules


def problems(count: int, seed: int):
    """Yield problems of 2 to 5 units with up to four modes, every 20th of 6 to 10 units with two."""
    rng = random.Random(seed)
    for i in range(count):
        long = i % 20 == 0
        yield rng, random_problem(rng, rng.randint(6, 10) if long else rng.choice([2, 3, 3, 4, 4, 5]), 2 if long else 4)


def test_equals_brute_force():
    count, solved, mixed = 200, 0, 0
    for rng, problem in problems(count, 0):
        schedules = all_schedules(problem)
        for modes in rng.sample(list(schedules), min(3, len(schedules))):
            assert (cost(problem, modes), peak(problem, modes)) == schedules[modes]
        smallest, modes = minimize_peak(problem)
        every = sorted(schedules.values())
        assert (smallest, schedules[tuple(modes)][0]) == min((size, price) for price, size in every)
        assert solve_timeline(problem, smallest - 1) is None
        for budget in (smallest, *rng.choices([size for _, size in every], k=2)):
            modes = solve_timeline(problem, budget)
            best = next((price, size) for price, size in every if size <= budget)  # the cheapest, of these the lowest
            assert schedules[tuple(modes)] == best
            solved += 1
            mixed += len(set(modes)) > 1
    assert solved == 3 * count
    assert mixed > count / 2


def test_what_units_leave_in_forward_counts_there():
    """Casts of weights: never over the budget, found whenever something fits, and as cheap as the gap says."""
    tight, gaps = 0, []
    for rng, plain in problems(60, 7):
        problem = leave_bytes(plain, rng)
        schedules = all_schedules(problem)
        smallest, modes = minimize_peak(problem)
        assert smallest == peak(problem, modes) == schedules[tuple(modes)][1]
        for budget in rng.choices([peak_bytes for _, peak_bytes in schedules.values()], k=3):
            best = min(price for price, peak_bytes in schedules.values() if peak_bytes <= budget)
            schedule = find_schedule(problem, budget)
            if schedule is None:
                assert budget < smallest
                continue
            price, peak_bytes = schedules[tuple(schedule.modes)]
            assert peak_bytes == peak(problem, schedule.modes) <= budget
            assert best <= price
            assert price * (1 - schedule.gap) <= best + 1e-9
            tight += price == best
            gaps.append(schedule.gap)
    assert tight > 0.9 * len(gaps) > 100
    assert gaps.count(0.0) > 0.75 * len(gaps)


def leave_bytes(problem: Problem, rng: random.Random) -> Problem:
    """Return the problem as under autocast: a unit has casts of some bytes, which it keeps when it stores, or leaves."""

    def leave(option: Option, size: int) -> Option:
        stores = option.mode == "store"
        return replace(option, kept_bytes=option.kept_bytes + size * stores, left_bytes=size * (not stores))

    def cast(unit: Unit) -> Unit:
        size = rng.randint(0, 12)
        first = None if unit.first is None else leave(unit.first, size)
        return replace(unit, options=tuple(leave(option, size) for option in unit.options), first=first)

    return replace(problem, units=tuple(map(cast, problem.units)), is_left_at_loss=rng.random() < 0.5)


def test_more_budget_is_never_slower():
    for _, problem in problems(30, 1):
        least, dearest = minimize_peak(problem)
        prices = []
        for budget in range(least, least + 120, 8):
            modes = solve_timeline(problem, budget)
            assert peak(problem, modes) <= budget
            prices.append(cost(problem, modes))
        assert prices == sorted(prices, reverse=True)
        assert prices[0] == cost(problem, dearest)


def chain(count: int) -> Problem:
    """Steps of which no two are equal, each with the four modes."""
    rng = random.Random(count)
    sizes = {state: rng.randint(10**6, 11 * 10**5) for state in range(count + 1)}
    units = []
    for k in range(count):
        size, work = rng.randint(10**6, 4 * 10**6), rng.randint(10**8, 10**9)
        need = (2 * size + sizes[k], 2 * size)
        invert = Option(Mode.INVERT, 0, (), sizes[k], (2 * size + 2 * sizes[k],) * 2, work + work // 7)
        options = (
            Option(Mode.STORE, size, (k,), size + sizes[k], need, 0),
            Option(Mode.SELECTIVE, size // 3, (k,), size + sizes[k], need, work // 20),
            Option(Mode.RECOMPUTE, 0, (k,), size + sizes[k], need, work),
            invert,
        )
        units.append(Unit(f"step{k}", (k - 1, k) if k else (0,), (k,), options, invert))
    return Problem(tuple(units), sizes, 10**8, 10**6, (count - 1, count))


def budgets(problem: Problem, parts: tuple[float, ...]) -> list[int]:
    least, _ = minimize_peak(problem)
    stored = peak(problem, ["store"] * len(problem.units))
    return [least + int(part * (stored - least)) for part in parts]


@pytest.mark.parametrize("most", [60, 2**24])
def test_what_is_dropped_costs_no_more_than_the_gap(most, monkeypatch):
    dropped = worse = 0
    for problem in (*(problem for _, problem in problems(6, 7)), chain(30)):
        for budget in budgets(problem, (0.0, 0.2, 0.5, 0.8)):
            least = cost(problem, find_schedule(problem, budget).modes)
            with monkeypatch.context() as patch:
                patch.setattr(timeline, "_MANY", most)
                schedule = find_schedule(problem, budget)
            found = cost(problem, schedule.modes)
            assert peak(problem, schedule.modes) <= budget
            assert least <= found
            assert found * (1 - schedule.gap) <= least + 1e-6
            dropped += schedule.gap > 0
            worse += found > least
    assert (dropped, worse) == (0, 0) if most > 60 else dropped >= worse > 0
