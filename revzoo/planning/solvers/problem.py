"""A model as the solvers see it: the bytes and costs of every unit in every mode.

A unit is a reversible step or a node. Between its forward and its backward it keeps bytes of its own. It may also keep some of
the *states*, the tensors that pass between units; a state that two units keep is counted once. A run of inverted steps keeps
only the pair of states after it. Backward visits the units in reverse and frees what each of them kept. The memory in use
during unit k is therefore what the preceding units keep, a prefix sum, plus what the unit itself needs. Under autocast a unit
also leaves casts of its weights until forward ends: during the forward of unit k, what the preceding ones have left counts too.

A schedule gives each unit one of its modes; what it takes is in `schedule_totals.py`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from revzoo.runtime.mode import Mode

_FEW_INPUTS = 2  # as the units of the zoo have; more can be any number


def tabulate(inputs: int, compute: Callable[[int], int]) -> Sequence[int]:
    """Return one number for each subset of a unit's inputs; of many inputs, each computed when it is first asked for.

    Args:
        inputs: how many there are.
        compute: returns the number of a subset, given its index: bit j says that input j belongs to it.
    """
    return tuple(map(compute, range(1 << inputs))) if inputs <= _FEW_INPUTS else _LazyTable(1 << inputs, compute)


class _LazyTable(Sequence[int]):
    """A sequence of numbers that are computed when they are asked for."""

    def __init__(self, length: int, compute: Callable[[int], int]):
        self._length, self._compute = length, cache(compute)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        return self._compute(range(self._length)[index])


@dataclass(frozen=True)
class Option:
    """One unit in one mode.

    Args:
        mode: of the unit.
        kept_bytes: bytes of its own, states not included, that the unit keeps from its forward until its backward.
        kept_states: states that the unit keeps as well, from its inputs or its outputs.
        forward_bytes: peak of what the unit allocates during its forward; the states before it are not counted.
        backward_bytes: peak of its backward above what the preceding units keep, one number for each subset of the unit's
            inputs: bit j of the index says that a preceding unit keeps `inputs[j]`, which is then not counted (`tabulate`).
        cost: extra work over storing [nanoseconds or FLOPs], at least 0.
        made_bytes: bytes allocated in backward beyond those that storing allocates there.
        left_bytes: alive from its forward to the end of all forwards, and not kept: casts of its weights under autocast.
    """

    mode: Mode
    kept_bytes: int
    kept_states: tuple[int, ...]
    forward_bytes: int
    backward_bytes: Sequence[int]
    cost: int
    made_bytes: int = 0
    left_bytes: int = 0


@dataclass(frozen=True)
class Unit:
    """A reversible step or a node, and its modes.

    Args:
        name: as in `model.units`.
        pair: its input and the older stream, each listed once.
        inputs: states passed to it, each listed once.
        options: its modes, one option each. The option of `invert` is the one inside a run of inverted steps.
        first: the option of `invert` for a step that begins a run; None if this unit cannot begin one.
        alive: states alive while its forward runs, whatever the schedule: the pair, and what a chain was called with.
    """

    name: str
    pair: tuple[int, ...]
    inputs: tuple[int, ...]
    options: tuple[Option, ...]
    first: Option | None = None
    alive: tuple[int, ...] = ()


@dataclass(frozen=True)
class Problem:
    """All units in order, and the memory that does not depend on the schedule.

    Args:
        units: in the order of forward.
        sizes: bytes of every state.
        fixed_bytes: alive during the whole training step: weights, buffers, batch, optimizer state.
        loss_bytes: what the loss needs between forward and backward, above what the units keep.
        pair_after: states after the last unit; they are alive at the loss, and a run that ends there keeps them.
        max_invert_run: most inverted steps in one run; None: any number.
        update_bytes: in use at the optimizer's update besides what is fixed: gradients, and what the update takes.
        is_left_at_loss: whether what units leave is alive at the loss.
    """

    units: tuple[Unit, ...]
    sizes: Mapping[int, int]
    fixed_bytes: int
    loss_bytes: int
    pair_after: tuple[int, ...]
    max_invert_run: int | None = None
    update_bytes: int = 0
    is_left_at_loss: bool = False

    @property
    def update_peak(self) -> int:
        """Peak of the optimizer's update, the same for every schedule; 0 if it takes nothing."""
        return self.fixed_bytes + self.update_bytes if self.update_bytes else 0

    @property
    def all_stored(self) -> list[Mode]:
        """The schedule that stores everything."""
        return [Mode.STORE] * len(self.units)

    def bytes_of(self, states: Sequence[int], held: frozenset[int]) -> int:
        """Return the bytes of those states that are not in `held`."""
        return sum(self.sizes[state] for state in states if state not in held)


def reprice(problem: Problem, price: Callable[[int, str, Option], int]) -> Problem:
    """Return the problem with other costs.

    Args:
        price: returns the cost of an option, given the index of its unit, its mode ("first" where it begins a run of
            inverted steps) and the option itself.
    """

    def reprice_unit(k: int, unit: Unit) -> Unit:
        options = tuple(replace(option, cost=price(k, option.mode, option)) for option in unit.options)
        first = None if unit.first is None else replace(unit.first, cost=price(k, "first", unit.first))
        return replace(unit, options=options, first=first)

    return replace(problem, units=tuple(reprice_unit(k, unit) for k, unit in enumerate(problem.units)))
