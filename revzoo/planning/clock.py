"""Measuring what every unit of a model takes in every mode, on this machine.

Whole training steps are run, each with another random mix of modes, and a mark is set whenever a unit begins, forward and
backward. So a unit is timed where it stands, with the caches and the allocator as training has them. Units that do the
same work are one kind and share their samples; the median of a kind and mode is its time.
"""

import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from revzoo.analysis.dry_run import call, isolated
from revzoo.planning.hooks import Walk, units
from revzoo.planning.problem import Problem, Unit, peak, repriced
from revzoo.planning.timeline import least_peak
from revzoo.planning.trace import Loss, total_loss
from revzoo.runtime.chain import Mode
from revzoo.runtime.layout import LayoutEntry

_RUNS = 5
_ROUNDS = 4  # in each, a unit without others of its kind has had every mode
_LIMIT_SECONDS = 120  # after the first round, a new one is begun only within it


@dataclass(frozen=True)
class Times:
    """What the steps that were run took.

    Args:
        step_seconds: of a forward and backward with everything stored, the sum of its units and of what is between them.
        forward_seconds: of each unit, stored.
        extra: of each unit and mode (and "first", where it begins a run of inverted steps), over storing [ns].
        backward_seconds: of each unit, stored, without any recovery.
        spread: half of all samples lie within this share of their median, for a typical kind and mode.
        runs: steps that were run.
    """

    step_seconds: float
    forward_seconds: tuple[float, ...]
    extra: tuple[dict[str, int], ...]
    spread: float
    runs: int
    backward_seconds: tuple[float, ...] = ()


def step_seconds(model: nn.Module, batch: Any, modes: Sequence[Mode], loss: Loss | None = None) -> float:
    """Run training steps with a schedule; return the median of their seconds, forward and backward.

    Raises:
        MemoryError: it ran out of memory.
    """
    found = model.schedule
    try:
        return statistics.median([_timed(model, batch, modes, loss)[0] for _ in range(_RUNS + 1)][1:])  # the first warms up
    finally:
        model.schedule = found


def measured_times(model: nn.Module, batch: Any, problem: Problem, allowance: int, loss: Loss | None = None) -> Times:
    """Run training steps of the model and return what its units take.

    Args:
        problem: of this model and batch, as counted.
        allowance: bytes that a step may take.
    Raises:
        MemoryError: no step that stores a few of its units fits the allowance, or one ran out of memory.
    """
    parts = units(model)
    kinds = [_kind(part, unit) for part, unit in zip(parts, problem.units, strict=True)]
    samples: dict[tuple[Any, str], list[float]] = defaultdict(list)
    forwards: dict[Any, list[float]] = defaultdict(list)
    backwards: dict[Any, list[float]] = defaultdict(list)
    rest: list[float] = []
    dice, found, runs, begun = random.Random(0), model.schedule, 0, time.perf_counter()
    try:
        for round_ in range(_ROUNDS):
            if round_ and time.perf_counter() - begun > _LIMIT_SECONDS:
                break
            for modes in _fitting(problem, parts, kinds, dice, allowance):
                if not runs:
                    _timed(model, batch, modes, loss)  # warms up
                total, forward, backward = _timed(model, batch, modes, loss)
                for k, variant in enumerate(variants(modes)):
                    samples[kinds[k], variant].append(forward[k] + backward[k])
                    if variant == "store":
                        forwards[kinds[k]].append(forward[k])
                        backwards[kinds[k]].append(backward[k])
                rest.append(total - sum(forward) - sum(backward))
                runs += 1
    finally:
        model.schedule = found
    medians = {key: statistics.median(times) for key, times in samples.items()}
    return Times(
        step_seconds=sum(medians[kind, "store"] for kind in kinds) + statistics.median(rest),
        forward_seconds=tuple(statistics.median(forwards[kind]) for kind in kinds),
        extra=tuple(_extra(medians, kind) for kind in kinds),
        spread=statistics.median(_spread(times) for times in samples.values()),
        runs=runs,
        backward_seconds=tuple(statistics.median(backwards[kind]) for kind in kinds),
    )


def estimated_times(model: nn.Module, batch: Any, problem: Problem, loss: Loss | None = None) -> Times:
    """Run the leanest schedule a few times; take the forward of a unit for what every mode but storing adds to its step.

    Cheap, and needs least memory, but `selective` and `recompute` add less in truth, so a plan may store less than it could.

    Raises:
        MemoryError: it ran out of memory.
    Source: Jiang et al. 2020, who find that inverting takes a forward more.
    """
    _, modes = least_peak(problem)
    kinds = [_kind(part, unit) for part, unit in zip(units(model), problem.units, strict=True)]
    forwards: dict[Any, list[float]] = defaultdict(list)
    totals, found = [], model.schedule
    try:
        for run in range(_RUNS + 1):
            total, forward, _ = _timed(model, batch, cast(list[Mode], modes), loss)
            if run:  # the first warms up
                totals.append(total)
                for kind, seconds in zip(kinds, forward, strict=True):
                    forwards[kind].append(seconds)
    finally:
        model.schedule = found
    each = tuple(statistics.median(forwards[kind]) for kind in kinds)
    again = sum(seconds for seconds, mode in zip(each, modes, strict=True) if mode != "store")
    return Times(
        step_seconds=statistics.median(totals) - again,
        forward_seconds=each,
        extra=tuple(_as_forward(seconds) for seconds in each),
        spread=statistics.median(_spread(seconds) for seconds in forwards.values()),
        runs=_RUNS,
    )


def _as_forward(seconds: float) -> dict[str, int]:
    return {"store": 0, **dict.fromkeys(("selective", "recompute", "invert", "first"), round(seconds * 1e9))}


def timed(problem: Problem, times: Times) -> Problem:
    """Return the problem with costs in nanoseconds instead of FLOPs."""
    return repriced(problem, lambda k, variant, _: times.extra[k][variant])


def variants(modes: Sequence[str]) -> Iterator[str]:
    """Yield the modes, those that begin a run of inverted steps as "first"."""
    before = ""
    for mode in modes:
        yield "first" if mode == "invert" and before != "invert" else mode
        before = mode


def _extra(medians: dict[tuple[Any, str], float], kind: Any) -> dict[str, int]:
    """Return what each variant takes over storing; of one that was never run, what its sister takes."""
    found = {variant: time for (other, variant), time in medians.items() if other == kind}
    for variant, sister in (("first", "invert"), ("invert", "first")):
        if sister in found:
            found.setdefault(variant, found[sister])
    return {variant: max(0, round((time - found["store"]) * 1e9)) for variant, time in found.items()}


def _spread(times: Sequence[float]) -> float:
    median = statistics.median(times)
    return statistics.median(abs(t - median) for t in times) / median if median else 0.0


def _kind(part: LayoutEntry, unit: Unit) -> Any:
    work = tuple((option.mode, option.kept_bytes, option.forward_bytes, option.cost) for option in unit.options)
    return type(part.module), tuple(p.shape for p in part.module.parameters()), work


def _fitting(
    problem: Problem, parts: Sequence[LayoutEntry], kinds: Sequence[Any], dice: random.Random, allowance: int
) -> list[list[Mode]]:
    """Return the schedules of a round that fit: every unit in every mode, or else four units of each kind."""
    for most in (len(parts), 4, 1):
        round_ = list(_round(parts, kinds, dice, most))
        if all(peak(problem, modes) <= allowance for modes in round_):
            return round_
    raise MemoryError("no step with a few stored units fits")


def _round(parts: Sequence[LayoutEntry], kinds: Sequence[Any], dice: random.Random, most: int) -> Iterator[list[Mode]]:
    """Yield schedules in which the first units of each kind have every mode once, the others their leanest."""
    menus: list[list[Mode]] = [["store", "selective", "recompute"] for _ in parts]
    seen: dict[Any, int] = defaultdict(int)
    for k, kind in enumerate(kinds):
        menus[k] += ["invert"] if parts[k].kind == "step" else []
        dice.shuffle(menus[k])
        if seen[kind] >= most:
            menus[k] = ["invert" if parts[k].kind == "step" else "recompute"]
        seen[kind] += 1
    for turn in range(4):
        yield [menu[turn % len(menu)] for menu in menus]


def _timed(model: nn.Module, batch: Any, modes: Sequence[Mode], loss: Loss | None) -> tuple[float, list[float], list[float]]:
    """Run a step; return the seconds of all of it, and of each unit forward and backward."""
    model.schedule = list(modes)  # type: ignore[assignment]
    clock = _clock(model)
    with memory_errors(), isolated(model, batch) as inputs, Walk(model, clock) as walk:
        clock.mark("begin", -1)
        outputs = call(model, inputs)
        clock.mark("loss", -1)
        total = total_loss(loss, outputs)
        del outputs
        walk.forward_ended()
        total.backward()
        clock.mark("end", -1)
        return clock.read(len(modes))


@contextmanager
def memory_errors() -> Iterator[None]:
    """Raise MemoryError for what PyTorch raises on a device or on the CPU when it has none left."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
            raise MemoryError(str(error)) from error
        raise


class _Clock:
    """Notes the time at every mark of a walk."""

    def __init__(self, now: Callable[[], Any], between: Callable[[Any, Any], float]):
        self._now, self._between = now, between
        self._marks: list[tuple[str, int, Any]] = []

    def mark(self, phase: str, unit: int) -> None:
        self._marks.append((phase, unit, self._now()))

    def forward(self, unit: int, inputs: Any, pair: Any) -> None:
        self.mark("forward", unit)

    def forward_ended(self, unit: int) -> None: ...

    def backward(self, unit: int) -> None:
        self.mark("backward", unit)

    def identify(self, tensors: Any) -> frozenset[int]:
        return frozenset()

    def read(self, count: int) -> tuple[float, list[float], list[float]]:
        spans = {"forward": [0.0] * count, "backward": [0.0] * count}
        for (phase, unit, start), (_, _, end) in zip(self._marks, self._marks[1:], strict=False):
            if phase in spans:
                spans[phase][unit] += self._between(start, end)
        return self._between(self._marks[0][2], self._marks[-1][2]), spans["forward"], spans["backward"]


def _clock(model: nn.Module) -> _Clock:
    device = next(model.parameters()).device
    if device.type != "cuda":
        return _Clock(time.perf_counter, lambda start, end: cast(float, end - start))

    def record() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(device))
        return event

    def between(start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000

    return _Clock(record, between)
