"""Schedules: one mode for every step and node, which decides what it keeps for backward (`chain.py`)."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from torch import nn

from revzoo.errors import ScheduleError, did_you_mean
from revzoo.runtime.mode import MODES, Mode

STAGE_INPUTS = "stage_inputs"  # a schedule of a whole model: steps invert, nodes recompute


@runtime_checkable
class Applicable(Protocol):
    """Something that gives a model its schedule, such as a `revzoo.Plan`."""

    def apply(self, model: nn.Module) -> None:
        """Set `model.schedule`."""


def check_schedule(modes: Sequence[str] | str, names: Sequence[str], allowed: Sequence[str] = MODES) -> list[Mode]:
    """Return one mode per name, from a list of modes or from one mode for all.

    Args:
        modes: what a user assigned to `schedule`.
        names: names of the steps and nodes that have a mode, in order; for messages.
        allowed: modes that these steps and nodes may have.
    Raises:
        ScheduleError: not a mode or a list, a wrong number of modes, or an unknown mode; names the entry, what is allowed and
            the nearest match.
    """
    if not isinstance(modes, str | Sequence):
        raise ScheduleError(f"A schedule is a mode ({', '.join(allowed)}) or a list of modes. Received: {modes!r}.")
    modes = [modes] * len(names) if isinstance(modes, str) else list(modes)
    if len(modes) != len(names):
        raise ScheduleError(f"A schedule needs one mode for each of {len(names)} units. Received: {len(modes)}.")
    for mode, name in zip(modes, names, strict=True):
        if mode not in allowed:
            raise ScheduleError(
                f"Unknown mode for {name}. Received: {mode!r}.{did_you_mean(str(mode), allowed)} Allowed: {', '.join(allowed)}."
            )
    return [Mode(mode) for mode in modes]


def limit_inverted_runs(modes: Sequence[Mode], longest: int | None) -> list[Mode]:
    """Return the modes with at most `longest` inverted steps in a row; the step after such a run recomputes.

    A recomputed step keeps its input (it is an *anchor*), so rounding errors do not add up beyond it.

    Args:
        modes: of all steps and nodes, in the order of forward. Only `invert` is ever replaced.
        longest: largest number of consecutive inverted steps; None is no limit.
    """
    limited: list[Mode] = []
    length = 0
    for mode in modes:
        length = length + 1 if mode.inverts else 0
        if longest is not None and length > longest:
            mode, length = Mode.RECOMPUTE, 0
        limited.append(mode)
    return limited
