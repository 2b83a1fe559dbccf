"""Measure how long every unit of a model takes in every mode, on this machine.

Whole training steps are run, each with another random mix of modes, and the time is noted whenever a unit begins its forward or
its backward. A unit is thus timed in its place, with the caches and the allocator as training has them. Units that do the same
work share their samples, and the median of the samples in a mode is the time of that mode.
"""

import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import nn

from revzoo.analysis.dry_run import call, isolated, leave_autocast, preserve_schedules
from revzoo.planning.profiling.hooks import PlannableModel, StepHooks, list_units
from revzoo.planning.profiling.trace import LossFunction, compute_loss
from revzoo.planning.solvers.problem import Problem, Unit, peak, reprice
from revzoo.planning.solvers.timeline import minimize_peak
from revzoo.runtime.layout import LayoutEntry
from revzoo.runtime.schedule import Mode

_RUNS = 5
_ROUNDS = 4  # after each round, even a unit that shares its samples with no other has had every mode
_LIMIT_SECONDS = 120  # no further round begins after this time


@dataclass(frozen=True)
class Timing:
    """How long the units of a model take.

    Args:
        step_seconds: one forward and backward with everything stored: the sum over all units and what runs between them.
        forward_seconds: of each unit when stored.
        extra: for each unit, by mode, the time of forward and backward beyond storing [nanoseconds]; "first" is "invert" for a
            step that begins a run of inverted steps.
        spread: half of the samples of a unit and mode lie within this fraction of their median, typically.
        runs: number of training steps that were run.
        backward_seconds: of each unit when stored, without any recovery.
    """

    step_seconds: float
    forward_seconds: tuple[float, ...]
    extra: tuple[dict[str, int], ...]
    spread: float
    runs: int
    backward_seconds: tuple[float, ...] = ()


def measure_step_seconds(
    model: PlannableModel,
    batch: Any,
    schedules: Sequence[tuple[Sequence[Mode], Literal[0, 1]]],
    loss: LossFunction | None = None,
) -> list[float]:
    """Run training steps with each schedule in turn; return the medians of their times, forward and backward [seconds].

    Args:
        model: one that can be planned.
        batch: of the size that is planned for.
        schedules: each with its look-ahead.
        loss: computes the loss from what the model returns; None is a sum.
    Raises:
        MemoryError: a training step ran out of memory.
    """
    with preserve_schedules(model):
        rounds = [[_time_step(model, batch, modes, loss, depth)[0] for modes, depth in schedules] for _ in range(_RUNS + 1)]
        return [statistics.median(times) for times in zip(*rounds[1:], strict=True)]  # the first round is a warm-up


def measure_timing(
    model: PlannableModel, batch: Any, problem: Problem, allowance: int, loss: LossFunction | None = None
) -> Timing:
    """Run training steps of the model and return how long its units take.

    Args:
        model: one that can be planned.
        batch: of the size that is planned for.
        problem: the counted bytes of this model and batch.
        allowance: limit for the peak of each step that is run [bytes].
        loss: computes the loss from what the model returns; None is a sum.
    Raises:
        MemoryError: no training step that stores a few of its units fits the allowance, or one ran out of memory.
    """
    entries = list_units(model)
    groups = [_work_key(entry, unit) for entry, unit in zip(entries, problem.units, strict=True)]
    samples: dict[tuple[Any, str], list[float]] = defaultdict(list)
    forwards: dict[Any, list[float]] = defaultdict(list)
    backwards: dict[Any, list[float]] = defaultdict(list)
    rest: list[float] = []
    rng, runs, begin = random.Random(0), 0, time.perf_counter()
    with preserve_schedules(model):
        for round_ in range(_ROUNDS):
            if round_ and time.perf_counter() - begin > _LIMIT_SECONDS:
                break
            for modes in _draw_fitting_schedules(problem, entries, groups, rng, allowance):
                if not runs:
                    _time_step(model, batch, modes, loss)  # a warm-up
                total, forward, backward = _time_step(model, batch, modes, loss)
                for k, variant in enumerate(list_variants(modes)):
                    samples[groups[k], variant].append(forward[k] + backward[k])
                    if variant == "store":
                        forwards[groups[k]].append(forward[k])
                        backwards[groups[k]].append(backward[k])
                rest.append(total - sum(forward) - sum(backward))
                runs += 1
    medians = {key: statistics.median(times) for key, times in samples.items()}
    return Timing(
        step_seconds=sum(medians[group, "store"] for group in groups) + statistics.median(rest),
        forward_seconds=tuple(statistics.median(forwards[group]) for group in groups),
        extra=tuple(_extra_over_store(medians, group) for group in groups),
        spread=statistics.median(_spread(times) for times in samples.values()),
        runs=runs,
        backward_seconds=tuple(statistics.median(backwards[group]) for group in groups),
    )


def estimate_timing(model: PlannableModel, batch: Any, problem: Problem, loss: LossFunction | None = None) -> Timing:
    """Time only the minimum-memory schedule; assume every other mode costs one extra forward pass of the unit.

    Cheap, and needs the least memory. `selective` and `recompute` cost less in truth, so the plan may not be the fastest.

    Raises:
        MemoryError: the training step ran out of memory.
    Source: Jiang et al. 2020, who find that inverting costs one more forward.
    """
    _, modes = minimize_peak(problem)
    groups = [_work_key(entry, unit) for entry, unit in zip(list_units(model), problem.units, strict=True)]
    forwards: dict[Any, list[float]] = defaultdict(list)
    totals = []
    with preserve_schedules(model):
        for run in range(_RUNS + 1):
            total, forward, _ = _time_step(model, batch, cast(list[Mode], modes), loss)
            if run:  # the first run is a warm-up
                totals.append(total)
                for group, seconds in zip(groups, forward, strict=True):
                    forwards[group].append(seconds)
    medians = tuple(statistics.median(forwards[group]) for group in groups)
    recomputed = sum(seconds for seconds, mode in zip(medians, modes, strict=True) if mode != "store")
    return Timing(
        step_seconds=statistics.median(totals) - recomputed,
        forward_seconds=medians,
        extra=tuple(_extra_of_a_forward(seconds) for seconds in medians),
        spread=statistics.median(_spread(seconds) for seconds in forwards.values()),
        runs=_RUNS,
    )


def _extra_of_a_forward(seconds: float) -> dict[str, int]:
    return {"store": 0, **dict.fromkeys(("selective", "recompute", "invert", "first"), round(seconds * 1e9))}


def price_by_time(problem: Problem, timing: Timing) -> Problem:
    """Return the problem with costs in nanoseconds instead of FLOPs."""
    return reprice(problem, lambda k, variant, _: timing.extra[k][variant])


def list_variants(modes: Sequence[str]) -> Iterator[str]:
    """Yield the modes, with "first" in place of an "invert" that begins a run of inverted steps."""
    before = ""
    for mode in modes:
        yield "first" if mode == "invert" and before != "invert" else mode
        before = mode


def _extra_over_store(medians: dict[tuple[Any, str], float], group: Any) -> dict[str, int]:
    """Return the extra time of each variant over storing; of "invert" and "first", one that was never run equals the other."""
    seconds = {variant: median for (key, variant), median in medians.items() if key == group}
    for variant, other in (("first", "invert"), ("invert", "first")):
        if other in seconds:
            seconds.setdefault(variant, seconds[other])
    return {variant: max(0, round((each - seconds["store"]) * 1e9)) for variant, each in seconds.items()}


def _spread(times: Sequence[float]) -> float:
    median = statistics.median(times)
    return statistics.median(abs(t - median) for t in times) / median if median else 0.0


def _work_key(entry: LayoutEntry, unit: Unit) -> Any:
    """Return a key that is equal for units that do the same work."""
    work = tuple((option.mode, option.kept_bytes, option.forward_bytes, option.cost) for option in unit.options)
    return type(entry.module), tuple(p.shape for p in entry.module.parameters()), work


def _draw_fitting_schedules(
    problem: Problem, entries: Sequence[LayoutEntry], groups: Sequence[Any], rng: random.Random, allowance: int
) -> list[list[Mode]]:
    """Return the schedules of a round that fits: every unit in every mode, or else four units of each group, or one."""
    for most in (len(entries), 4, 1):
        schedules = list(_draw_schedules(entries, groups, rng, most))
        if all(peak(problem, modes) <= allowance for modes in schedules):
            return schedules
    raise MemoryError("no training step with a few stored units fits")


def _draw_schedules(
    entries: Sequence[LayoutEntry], groups: Sequence[Any], rng: random.Random, most: int
) -> Iterator[list[Mode]]:
    """Yield schedules in which the first `most` units of each group have every mode once, and all others keep least."""
    menus: list[list[Mode]] = [["store", "selective", "recompute"] for _ in entries]
    seen: dict[Any, int] = defaultdict(int)
    for k, group in enumerate(groups):
        menus[k] += ["invert"] if entries[k].can_invert else []
        rng.shuffle(menus[k])
        if seen[group] >= most:
            menus[k] = ["invert" if entries[k].can_invert else "recompute"]
        seen[group] += 1
    for turn in range(4):
        yield [menu[turn % len(menu)] for menu in menus]


def _time_step(
    model: PlannableModel, batch: Any, modes: Sequence[Mode], loss: LossFunction | None, lookahead: Literal[0, 1] = 0
) -> tuple[float, list[float], list[float]]:
    """Run a training step; return the seconds of all of it, of each unit's forward, and of each unit's backward."""
    model.schedule = list(modes)
    model.lookahead = lookahead
    clock = _make_clock(model)
    with memory_errors(), isolated(model, batch) as inputs, StepHooks(model, clock) as hooks:
        clock.mark("begin", -1)
        outputs = call(model, inputs)
        clock.mark("loss", -1)
        total = compute_loss(loss, outputs)
        del outputs
        hooks.enter_backward()
        with leave_autocast():
            total.backward()
        clock.mark("end", -1)
        return clock.read(len(modes))


@contextmanager
def memory_errors() -> Iterator[None]:
    """Raise MemoryError where PyTorch raises its own errors for too little memory, on a device or on the CPU."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
            raise MemoryError(str(error)) from error
        raise


class _Clock:
    """The listener that notes the time at every event."""

    def __init__(self, now: Callable[[], Any], between: Callable[[Any, Any], float]):
        self._now, self._between = now, between
        self._marks: list[tuple[str, int, Any]] = []

    def mark(self, phase: str, unit: int) -> None:
        self._marks.append((phase, unit, self._now()))

    def begin_forward(self, unit: int, inputs: Any, pair: Any) -> None:
        self.mark("forward", unit)

    def end_forward(self, unit: int) -> None: ...

    def begin_backward(self, unit: int) -> None:
        self.mark("backward", unit)

    def identify(self, tensors: Any) -> frozenset[int]:
        return frozenset()

    def read(self, count: int) -> tuple[float, list[float], list[float]]:
        spans = {"forward": [0.0] * count, "backward": [0.0] * count}
        for (phase, unit, start), (_, _, end) in zip(self._marks, self._marks[1:], strict=False):
            if phase in spans:
                spans[phase][unit] += self._between(start, end)
        return self._between(self._marks[0][2], self._marks[-1][2]), spans["forward"], spans["backward"]


def _make_clock(model: nn.Module) -> _Clock:
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
