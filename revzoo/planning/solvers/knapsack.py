"""The published additive model over storing and inverting: `solver="knapsack"`, to compare with.

Choosing what to store is then a knapsack: the most saved time under one capacity. That is the special case of a timeline in
which only the total of what is kept counts, so `timeline.py` solves it exactly.
"""

from collections.abc import Sequence
from typing import Literal

from revzoo.planning.solvers.problem import Option, Problem, Unit
from revzoo.planning.solvers.schedule_totals import Edge, follow_schedule, loss_need_bytes, peak
from revzoo.planning.solvers.timeline import solve_timeline
from revzoo.runtime.mode import Mode

Baseline = Literal["peak", "static"]


def solve_knapsack(problem: Problem, budget: int, baseline: Baseline = "peak") -> list[Mode] | None:
    """Return the schedule of the additive model: store the steps that save most time per byte, invert all others.

    The model adds the bytes of the stored steps to a baseline m_o, that of the schedule that inverts every step that it can.
    It cannot see that the last steps store almost for free, nor that every further run keeps a pair of states. With the
    baseline "peak" much of the budget stays unused, and yet the true peak can exceed it; with "static" it nearly always does.
    `solve_timeline` is exact. This function is here to compare with.

    Args:
        budget: limit for the peak of all memory together [bytes].
        baseline: what m_o is. "peak": the peak of the inverted schedule; "static": what it keeps from forward to backward.
    Returns: one mode per unit, or None where m_o is above the budget. The limit on runs of inverted steps is not checked.
    Raises: ValueError: a unit can neither invert nor store.
    Source: Jiang et al., "An Efficient Training Framework for Reversible Neural Architectures", ECCV 2020, problem 6,
        without its table over bytes; nodes always store.
    """
    stores = [any(option.mode == Mode.STORE for option in unit.options) for unit in problem.units]
    can_invert = [unit.first is not None and stores for unit, stores in zip(problem.units, stores, strict=True)]
    steps = [k for k, can in enumerate(can_invert) if can]
    modes = [Mode.INVERT if can else Mode.STORE for can in can_invert]
    inverted = list(follow_schedule(problem, modes))
    if baseline == "peak":
        baseline_bytes = peak(problem, modes)
    else:
        kept = sum(edge.kept_bytes for edge in inverted)
        baseline_bytes = problem.fixed_bytes + kept + loss_need_bytes(problem, inverted[-1].after.held) - problem.loss_bytes
    if baseline_bytes > budget:
        return None
    chosen = solve_timeline(_add_up(problem, steps, inverted), budget - baseline_bytes)
    assert chosen is not None  # to invert all takes nothing more
    for k, mode in zip(steps, chosen, strict=True):
        modes[k] = mode
    return modes


def _add_up(problem: Problem, steps: Sequence[int], inverted: Sequence[Edge]) -> Problem:
    """Return a problem where stored steps take what they keep, inverted ones take nothing, and nothing else counts."""
    units = []
    for k in steps:
        unit = problem.units[k]
        store = next(option for option in unit.options if option.mode == Mode.STORE)
        size = store.kept_bytes + problem.bytes_of(store.kept_states, frozenset())
        saved = inverted[k].cost - store.cost
        options = Option(Mode.STORE, size, (), size, (size,), 0), Option(Mode.INVERT, 0, (), 0, (0,), saved)
        units.append(Unit(unit.name, (), (), options, first=options[1]))
    return Problem(tuple(units), {}, fixed_bytes=0, loss_bytes=0, pair_after=())
