"""The memory and the cost of a schedule over time.

A schedule gives each unit one of its modes. An `Edge` is one unit in one mode, given the modes of the preceding units. Both
`follow_schedule` and the search in `timeline.py` are made of edges, so they always agree to the byte.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from revzoo.planning.solvers.problem import Problem
from revzoo.runtime.mode import Mode


@dataclass(frozen=True)
class PhasePeak:
    """The peak memory of one phase of a training step.

    Args:
        name: of the unit; "loss" for the loss.
        phase: the unit's forward or backward, or the loss between the two.
        bytes: peak of all memory together.
    """

    name: str
    phase: Literal["forward", "loss", "backward"]
    bytes: int


class Place(NamedTuple):
    """All that a unit and the following ones must know of the modes before it.

    Args:
        run: length of the run of inverted steps that ends before it.
        held: states kept by the preceding units.
    """

    run: int = 0
    held: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Edge:
    """One unit in one mode, given the modes of the preceding units.

    Args:
        mode: of the unit.
        cost: extra work over storing.
        forward_bytes: peak of the unit's forward above what the preceding units keep and have left.
        backward_bytes: the same of its backward.
        kept_bytes: what the unit adds to the memory kept until its backward.
        left_bytes: what it adds to the memory that is alive until the end of all forwards.
        after: the place after the unit.
    """

    mode: Mode
    cost: int
    forward_bytes: int
    backward_bytes: int
    kept_bytes: int
    left_bytes: int
    after: Place

    @property
    def need_bytes(self) -> int:
        """The larger of the peaks of its forward and its backward, where the preceding units have left nothing."""
        return max(self.forward_bytes, self.backward_bytes)


def list_edges(problem: Problem, k: int, before: Place) -> Iterator[Edge]:
    """Yield an edge for each mode that unit k can have.

    Args:
        k: index of the unit.
        before: the place before it.
    """
    unit, run, held = problem.units[k], before.run, before.held
    for option in (unit.first if option.mode.inverts and not run else option for option in unit.options):
        if option is None:
            continue
        inverted = option.mode.inverts
        closed = unit.pair if run and not inverted else ()  # the run ends before this unit and keeps its pair
        closed_bytes, held_before = problem.bytes_of(closed, held), held.union(closed)
        alive_bytes = problem.bytes_of(unit.alive or unit.pair, held_before)
        known = sum(1 << j for j, state in enumerate(unit.inputs) if state in held_before)
        yield Edge(
            mode=option.mode,
            cost=option.cost,
            forward_bytes=closed_bytes + alive_bytes + option.forward_bytes,
            backward_bytes=closed_bytes + option.backward_bytes[known],
            kept_bytes=closed_bytes + option.kept_bytes + problem.bytes_of(option.kept_states, held_before),
            left_bytes=option.left_bytes,
            after=Place(run + 1 if inverted else 0, held_before.union(option.kept_states)),
        )


def loss_need_bytes(problem: Problem, held: frozenset[int]) -> int:
    """Return what the loss needs above the bytes that the units keep."""
    return problem.loss_bytes + problem.bytes_of(problem.pair_after, held)


def follow_schedule(problem: Problem, modes: Sequence[str]) -> Iterator[Edge]:
    """Yield the edges of a schedule, in the order of forward. Raises as `peak` does."""
    if len(modes) != len(problem.units):
        raise ValueError(f"A schedule has one mode per unit: {len(problem.units)}. Received: {len(modes)}.")
    place = Place()
    for k, (unit, mode) in enumerate(zip(problem.units, modes, strict=True)):
        edges: dict[str, Edge] = {edge.mode: edge for edge in list_edges(problem, k, place)}
        if mode not in edges:
            raise ValueError(f"Unit {unit.name!r} has the modes {', '.join(edges)} here. Received: {mode!r}.")
        yield edges[mode]
        place = edges[mode].after


def peak(problem: Problem, modes: Sequence[str]) -> int:
    """Return the peak memory of a schedule. The limit on runs of inverted steps is not checked.

    Raises: ValueError: not one mode per unit, or a mode that its unit cannot have there.
    """
    return max(problem.update_peak, *(phase.bytes for phase in list_phase_peaks(problem, modes)))


def cost(problem: Problem, modes: Sequence[str]) -> int:
    """Return the extra work of a schedule over storing everything, in the unit of its options. Raises as `peak` does."""
    return sum(edge.cost for edge in follow_schedule(problem, modes))


def list_phase_peaks(problem: Problem, modes: Sequence[str]) -> list[PhasePeak]:
    """Return the peak of every phase: the units forward, the loss, the units backward. Raises as `peak` does."""
    forward, backward, held = [], [], frozenset[int]()
    kept, left = problem.fixed_bytes, 0
    for unit, edge in zip(problem.units, follow_schedule(problem, modes), strict=True):
        forward.append(PhasePeak(unit.name, "forward", kept + left + edge.forward_bytes))
        backward.append(PhasePeak(unit.name, "backward", kept + edge.backward_bytes))
        kept, left, held = kept + edge.kept_bytes, left + edge.left_bytes, edge.after.held
    loss = kept + left * problem.is_left_at_loss + loss_need_bytes(problem, held)
    return [*forward, PhasePeak("loss", "loss", loss), *reversed(backward)]
