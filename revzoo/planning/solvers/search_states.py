"""The search states that schedules can reach within a budget: before each unit, and after the last one.

A *search state* is all that a unit and the following ones must know of those before it: the length of the run of inverted steps
that ends there, and the states (tensors) that the preceding units keep.
"""

from dataclasses import dataclass, field

from revzoo.planning.solvers.problem import Problem
from revzoo.planning.solvers.schedule import Edge, Place, list_edges

ABOVE_ALL = 1 << 62  # a budget or cost above all


@dataclass
class Node:
    """A search state that can be reached within the budget.

    Args:
        min_bytes: fewest bytes kept before it by a schedule that reaches it.
        edges: one for each mode of the next unit, with the search state that it leads to.
    """

    min_bytes: int
    edges: list[tuple[Edge, Place]] = field(default_factory=list)


Layer = dict[Place, Node]


def reach_search_states(problem: Problem, budget: int) -> list[Layer]:
    """Return the search states that can be reached within the budget: before each unit, and after the last."""
    longest = problem.max_invert_run
    last_use = _find_last_uses(problem)
    layers = [{Place(): Node(problem.fixed_bytes)}]
    for k in range(len(problem.units)):
        following: Layer = {}
        for place, node in layers[-1].items():
            for edge in list_edges(problem, k, place):
                after = edge.after
                if node.min_bytes + edge.need_bytes > budget or (longest is not None and after.run > longest):
                    continue
                run = min(after.run, 1) if longest is None else after.run  # only a limit needs the length
                held = frozenset(state for state in after.held if last_use.get(state, -1) > k)
                to = after._replace(run=run, held=held)
                node.edges.append((edge, to))
                kept = node.min_bytes + edge.kept_bytes
                successor = following.setdefault(to, Node(kept))
                successor.min_bytes = min(successor.min_bytes, kept)
        layers.append(following)
    return layers


def _find_last_uses(problem: Problem) -> dict[int, int]:
    """Return for every state the last unit that refers to it; the number of units if the loss does."""
    last_use: dict[int, int] = {}
    for k, unit in enumerate(problem.units):
        kept_states = (option.kept_states for option in unit.options)
        last_use.update(dict.fromkeys((*unit.pair, *unit.beside, *unit.inputs, *(s for kept in kept_states for s in kept)), k))
    return last_use | dict.fromkeys(problem.pair_after, len(problem.units))
