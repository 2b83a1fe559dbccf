"""Random chains to plan, and every schedule they have."""

import random
from collections.abc import Iterator
from dataclasses import replace

from revzoo.planning.solvers.problem import Option, Problem, Unit
from revzoo.planning.solvers.schedule_totals import peak
from revzoo.planning.solvers.timeline import minimize_peak
from revzoo.runtime.mode import Mode


def like_network(rng: random.Random, steps: int) -> Problem:
    """Return a chain as networks are: stages of steps with states of one size, and a node in front of each.

    A step stores 3 to 12 times a state, and its products are a part of that; running it forward takes as much at once, and
    backward a third more. A node stores 2 to 6 states. Extra work goes with the bytes and differs by a factor of 4
    from step to step; selective is a tenth of that, and inverting costs a twentieth more than running again.
    """
    stages = rng.randint(1, 4)
    behind, units, sizes = 0, list[Unit](), dict[int, int]()
    state = rng.randint(2**18, 2**24)
    for stage in range(stages):
        for position in range(steps // stages + (stage < steps % stages) + 1):
            sizes[behind] = state
            more = (behind - 1,) if position > 1 else ()
            if position:
                units.append(_step(rng, f"stage{stage}.{position}", (*more, behind), state))
            else:
                units.append(_node(rng, f"stage{stage}", behind, state))
                state = max(state // rng.choice([1, 2, 2, 4]), 2**12) if stage else state
            behind += 1
    sizes[behind] = state
    return Problem(tuple(units), sizes, rng.randint(0, 2**26), 2 * state, (behind - 1, behind))


def _step(rng: random.Random, name: str, pair: tuple[int, ...], state: int) -> Unit:
    kept = int(state * rng.uniform(3, 12))
    products, top, work = (
        int(kept * rng.uniform(0.3, 0.7)),
        kept + kept // 3 + 2 * state,
        int(kept * rng.uniform(0.5, 2) / 100),
    )
    given = pair[-1:]

    def option(mode: str, own: int, backward: int, share: float) -> Option:
        kept_states = () if mode == "invert" else given
        known = (backward + state, backward)  # the input, unless a unit in front keeps it
        return Option(Mode(mode), own, kept_states, kept + state, known, int(work * share))

    invert = option("invert", 0, top + 2 * state, 1.05)
    first = replace(invert, cost=int(work * 0.8), backward_bytes=tuple(b - state for b in invert.backward_bytes))
    options = option("store", kept, top, 0), option("selective", products, top, 0.1), option("recompute", 0, top, 0.8), invert
    return Unit(name, pair, given, options, first)


def _node(rng: random.Random, name: str, given: int, state: int) -> Unit:
    kept = int(state * rng.uniform(2, 6))
    top, work, inputs = kept + 2 * state, int(kept * rng.uniform(0.5, 2) / 100), (given,)
    known = (top + state, top)
    options = (
        Option(Mode.STORE, kept, inputs, kept + state, known, 0),
        Option(Mode.RECOMPUTE, 0, inputs, kept + state, known, work),
    )
    return Unit(name, inputs, inputs, options)


def of_kinds(rng: random.Random, steps: int, kinds: int) -> Problem:
    """Return a chain of steps of one stage that repeats a given number of different steps in turn."""
    state = 2**22
    models = [_step(rng, "", (0, 1), state) for _ in range(kinds)]
    units = []
    for k in range(steps):
        pair = (k - 1, k) if k else (0,)
        options = tuple(replace(o, kept_states=(k,) if o.kept_states else ()) for o in models[k % kinds].options)
        units.append(replace(models[k % kinds], name=f"step{k}", pair=pair, inputs=(k,), options=options))
    return Problem(tuple(units), dict.fromkeys(range(steps + 1), state), 0, 2 * state, (steps - 1, steps))


def only(problem: Problem, modes: tuple[str, ...]) -> Problem:
    """Return the problem with these modes only; a unit that has none of them keeps its own."""

    def limit(unit: Unit) -> Unit:
        options = tuple(option for option in unit.options if option.mode in modes)
        return replace(unit, options=options or unit.options, first=unit.first if "invert" in modes else None)

    return replace(problem, units=tuple(map(limit, problem.units)))


def span(problem: Problem) -> tuple[int, int]:
    """Return the smallest peak that a schedule can have, and the peak of storing everything."""
    return minimize_peak(problem)[0], peak(problem, ["store"] * len(problem.units))


def arbitrary(rng: random.Random, units: int, schedules: int = 4000) -> Problem:
    """Return a chain of steps and nodes with small random numbers, which has at most `schedules` schedules."""
    sizes = {state: rng.randint(1, 12) for state in range(units + 1)}
    made, product = list[Unit](), 1
    for k in range(units):
        pair = (max(k - 1, 0), k) if k else (0,)
        node = rng.random() < 0.25
        inputs = pair if node and rng.random() < 0.6 else (k,)
        most = max(1, min(4, schedules // (product * 2 ** (units - k - 1))))
        others = rng.sample(["selective", "recompute"] + ([] if node else ["invert"]), min(most - 1, 2 if node else 3))
        product *= 1 + len(others)
        options = [_arbitrary(rng, mode, inputs, sizes) for mode in ("store", *others)]
        first = _arbitrary(rng, "invert", inputs, sizes) if "invert" in others and rng.random() < 0.9 else None
        made.append(Unit(f"u{k}", pair, inputs, tuple(options), first))
    run = rng.choice([None, None, 0, 1, 2, 3])
    return Problem(tuple(made), sizes, rng.randint(0, 20), rng.randint(0, 30), (units - 1, units), run)


def _arbitrary(rng: random.Random, mode: str, inputs: tuple[int, ...], sizes: dict[int, int]) -> Option:
    kept = 0 if mode in ("recompute", "invert") else rng.randint(0, 30)
    top = rng.randint(kept, kept + 30)
    known = (sum(sizes[s] for j, s in enumerate(inputs) if not i >> j & 1) for i in range(2 ** len(inputs)))
    cost = 0 if mode == "store" else rng.randint(1, 9)
    kept_states = () if mode == "invert" else inputs
    return Option(Mode(mode), kept, kept_states, rng.randint(kept, kept + 20), tuple(top + more for more in known), cost)


def every_schedule(problem: Problem) -> Iterator[tuple[int, int]]:
    """Yield cost and peak of every schedule, from the definition of `Problem`'s fields, without the planner's own code."""

    def bytes_of(states: tuple[int, ...], held: frozenset[int]) -> int:
        return sum(problem.sizes[state] for state in states if state not in held)

    waiting = [(0, problem.fixed_bytes, frozenset[int](), 0, 0, 0)]
    while waiting:
        k, kept, held, run, price, top = waiting.pop()
        pair = problem.units[k].pair if k < len(problem.units) else problem.pair_after
        ended = kept + bytes_of(pair, held), held.union(pair)
        if k == len(problem.units):
            yield price, max(top, ended[0] + problem.loss_bytes)
            continue
        for option in problem.units[k].options:
            inverted = option.mode == "invert"
            if inverted and (run == problem.max_invert_run or (not run and problem.units[k].first is None)):
                continue
            now, have = (kept, held) if inverted or not run else ended
            taken = problem.units[k].first if inverted and not run else option
            assert taken is not None
            index = sum(2**j for j, state in enumerate(problem.units[k].inputs) if state in have)
            needs = now + bytes_of(pair, have) + taken.forward_bytes, now + taken.backward_bytes[index]
            after = now + taken.kept_bytes + bytes_of(taken.kept_states, have)
            waiting.append(
                (k + 1, after, have.union(taken.kept_states), run + 1 if inverted else 0, price + taken.cost, max(top, *needs))
            )
