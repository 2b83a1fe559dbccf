"""The memory of a schedule over time: what every unit keeps, and what each moment needs.

A unit is a reversible step or a node. Between its forward and its backward it keeps bytes of its own, and perhaps some of
the tensors that pass between units, the *states*, which another unit may keep as well and which count once. A run of
inverted steps keeps nothing but the pair of states behind it. Backward visits the units in reverse and frees what each
kept, so that at unit k only what the units in front of it keep is alive: the bytes of a moment are a prefix sum plus
what the moment itself needs.

A schedule gives each unit one of its modes. `Move` is one unit in one mode, seen from where the walk stands; the walk
below and the search in `timeline.py` are both made of moves, so they cannot disagree about a byte.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True)
class Option:
    """One unit in one mode.

    Args:
        mode: "store", "selective", "recompute" or "invert".
        kept_bytes: bytes of its own that it keeps from its forward until its backward.
        holds: states that it keeps as well, of its inputs or of what it makes.
        forward_bytes: most bytes born in its forward and alive at once; the states in front of it are not counted.
        backward_bytes: peak of its backward above what the units in front keep, one for each subset of the unit's
            inputs: bit j of the index says that a unit in front keeps `inputs[j]`, which is then not counted here.
        cost: extra work over storing [nanoseconds or FLOPs], at least 0.
        made_bytes: bytes made in backward beyond those that storing makes there.
    """

    mode: str
    kept_bytes: int
    holds: tuple[int, ...]
    forward_bytes: int
    backward_bytes: tuple[int, ...]
    cost: int
    made_bytes: int = 0


@dataclass(frozen=True)
class Unit:
    """A reversible step or a node, and its modes.

    Args:
        name: as in `model.units`.
        pair: states alive while it runs forward (its input and the older stream), each once.
        inputs: states that it is given, each once, at most two.
        options: its modes, at most one option each; that of "invert" holds inside a run of inverted steps.
        first: the option of "invert" where it begins a run; None: it cannot.
    """

    name: str
    pair: tuple[int, ...]
    inputs: tuple[int, ...]
    options: tuple[Option, ...]
    first: Option | None = None


@dataclass(frozen=True)
class Problem:
    """All units in order, and what is there beside them.

    Args:
        units: in the order of forward.
        sizes: bytes of every state.
        fixed_bytes: alive all the time: weights, buffers, batch, state of the optimizer.
        loss_bytes: needed between forward and backward above what is kept.
        pair_after: states behind the last unit, which are there at the loss, and which a run that ends there keeps.
        max_invert_run: most inverted steps in one run; None: any number.
    """

    units: tuple[Unit, ...]
    sizes: Mapping[int, int]
    fixed_bytes: int
    loss_bytes: int
    pair_after: tuple[int, ...]
    max_invert_run: int | None = None

    def bytes_of(self, states: Sequence[int], held: frozenset[int]) -> int:
        """Return the bytes of those states that are not held already."""
        return sum(self.sizes[state] for state in states if state not in held)


def repriced(problem: Problem, price: Callable[[int, str, Option], int]) -> Problem:
    """Return the problem with other costs.

    Args:
        price: of an option, given the number of its unit, its mode ("first" where it begins a run) and itself.
    """

    def unit(k: int, found: Unit) -> Unit:
        options = tuple(replace(option, cost=price(k, option.mode, option)) for option in found.options)
        first = None if found.first is None else replace(found.first, cost=price(k, "first", found.first))
        return replace(found, options=options, first=first)

    return replace(problem, units=tuple(unit(k, found) for k, found in enumerate(problem.units)))


@dataclass(frozen=True)
class Moment:
    """The bytes alive at most during one unit's forward or backward, or at the loss between them."""

    name: str
    phase: Literal["forward", "loss", "backward"]
    bytes: int


@dataclass(frozen=True)
class Move:
    """One unit in one mode, after some prefix: what it needs above the bytes kept so far, and what it leaves behind."""

    mode: str
    cost: int
    forward_bytes: int
    backward_bytes: int
    kept_bytes: int
    run: int  # inverted steps up to here, 0 outside a run
    held: frozenset[int]

    @property
    def need_bytes(self) -> int:
        """The larger need of its two moments."""
        return max(self.forward_bytes, self.backward_bytes)


def moves(problem: Problem, k: int, run: int, held: frozenset[int]) -> Iterator[Move]:
    """Yield unit k in each mode that it has, behind `run` inverted steps and with the states `held` kept in front of it."""
    unit = problem.units[k]
    for option in unit.options:
        inverted = option.mode == "invert"
        if inverted and not run:
            if unit.first is None:
                continue
            option = unit.first
        closed = unit.pair if run and not inverted else ()  # the run ends in front of this unit and keeps its pair
        before, front = problem.bytes_of(closed, held), held.union(closed)
        known = sum(1 << j for j, state in enumerate(unit.inputs) if state in front)
        yield Move(
            mode=option.mode,
            cost=option.cost,
            forward_bytes=before + problem.bytes_of(unit.pair, front) + option.forward_bytes,
            backward_bytes=before + option.backward_bytes[known],
            kept_bytes=before + option.kept_bytes + problem.bytes_of(option.holds, front),
            run=run + 1 if inverted else 0,
            held=front.union(option.holds),
        )


def end_bytes(problem: Problem, held: frozenset[int]) -> int:
    """Return what the loss needs above the bytes kept so far."""
    return problem.loss_bytes + problem.bytes_of(problem.pair_after, held)


def walk(problem: Problem, modes: Sequence[str]) -> Iterator[Move]:
    """Yield the moves of a schedule, in the order of forward. Raises as `peak` does."""
    if len(modes) != len(problem.units):
        raise ValueError(f"A schedule has one mode per unit: {len(problem.units)}. Received: {len(modes)}.")
    run, held = 0, frozenset[int]()
    for k, (unit, mode) in enumerate(zip(problem.units, modes, strict=True)):
        found = {move.mode: move for move in moves(problem, k, run, held)}
        if mode not in found:
            raise ValueError(f"Unit {unit.name!r} has the modes {', '.join(found)} here. Received: {mode!r}.")
        yield found[mode]
        run, held = found[mode].run, found[mode].held


def peak(problem: Problem, modes: Sequence[str]) -> int:
    """Return the most bytes alive at once under a schedule, whatever the length of its runs.

    Raises: ValueError: not one mode per unit, or one that its unit does not have there.
    """
    return max(moment.bytes for moment in timeline_of(problem, modes))


def cost(problem: Problem, modes: Sequence[str]) -> int:
    """Return the extra work of a schedule, in the unit of its options. Raises as `peak` does."""
    return sum(move.cost for move in walk(problem, modes))


def timeline_of(problem: Problem, modes: Sequence[str]) -> list[Moment]:
    """Return the bytes of every moment: the units forward, the loss, the units backward. Raises as `peak` does."""
    forward, backward, held = [], [], frozenset[int]()
    total = problem.fixed_bytes
    for unit, move in zip(problem.units, walk(problem, modes), strict=True):
        forward.append(Moment(unit.name, "forward", total + move.forward_bytes))
        backward.append(Moment(unit.name, "backward", total + move.backward_bytes))
        total, held = total + move.kept_bytes, move.held
    return [*forward, Moment("loss", "loss", total + end_bytes(problem, held)), *reversed(backward)]
