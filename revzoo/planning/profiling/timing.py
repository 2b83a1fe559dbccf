"""Measure how long every unit of a model takes in every mode, on this machine.

Whole training steps are run, each with another random mix of modes, and the time is noted whenever a unit begins its forward or
its backward. A unit is thus timed in its place, with the caches and the allocator as training has them. Units that do the same
work share their samples, and the median of the samples in a mode is the time of that mode. A mode that runs again all that
another one runs again cannot take less time: where the medians say so, they are averaged.
"""

import random
import statistics
from collections import defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from revzoo.analysis.autocast import leave_autocast
from revzoo.analysis.chains import preserve_schedules
from revzoo.analysis.dry_run import LossFunction, call, compute_loss, isolated, memory_errors
from revzoo.analysis.kept_values import KeptValues, leave_kept_values
from revzoo.device import forget_peak, has_streams
from revzoo.planning.profiling.clock import Clock, Median, combine_spreads, find_median, make_clock, repeat, smooth_rising
from revzoo.planning.profiling.hooks import StepHooks, assign_schedule, list_units
from revzoo.planning.solvers.problem import Problem, Unit, reprice
from revzoo.planning.solvers.schedule_totals import peak
from revzoo.runtime.layer_rules import is_made_of_layers
from revzoo.runtime.layout import LayoutEntry
from revzoo.runtime.lookahead import LookaheadOption
from revzoo.runtime.mode import MODES, Mode
from revzoo.runtime.nested import tensors_in

_RUNS = 5  # at least
_ROUNDS = 4  # at least; after each, even a unit that shares its samples with no other has had every mode
_NOT_INVERTED = MODES[:-1]  # each runs again what the one before does, and more
_ROUNDING = 2**20  # bytes to which workspaces are rounded up: smaller blocks are not split, which differs from run to run
_INVERTED = ("first", Mode.INVERT)  # of a step both run all of it again


@dataclass(frozen=True)
class Timing:
    """How long the units of a model take.

    Args:
        step_seconds: one forward and backward with everything stored: the sum over all units and what runs between them.
        forward_seconds: of each unit when stored.
        extra: for each unit, by mode, the time of forward and backward beyond storing [nanoseconds]; "first" is `invert` for a
            step that begins a run of inverted steps.
        spread: by how much of itself a time differs if it is measured again: the standard error of the medians.
        runs: number of training steps that were run.
    """

    step_seconds: float
    forward_seconds: tuple[float, ...]
    extra: tuple[dict[str, int], ...]
    spread: float
    runs: int


def measure_step_seconds(
    model: nn.Module, batch: Any, modes: Sequence[Mode], loss: LossFunction | None = None, lookahead: LookaheadOption = 0
) -> Median:
    """Run training steps with a schedule; return the median of their times, forward and backward.

    Args:
        model: one that can be planned.
        batch: of the size that is planned for.
        modes: the schedule.
        loss: computes the loss from what the model returns; None is a sum.
        lookahead: how many units are recovered ahead of backward. With 1 the time is the one that passes, also on a CPU.
    Raises:
        MemoryError: a training step ran out of memory.
    """
    times: list[float] = []
    with preserve_schedules(model), ExitStack() as stack:
        _warm_up(stack, model, batch, modes, loss, lookahead)
        for _ in repeat(_RUNS, lambda: find_median(times).spread):
            times.append(_time_step(model, batch, modes, loss, lookahead)[0])
    return find_median(times)


def measure_timing(model: nn.Module, batch: Any, problem: Problem, allowance: int, loss: LossFunction | None = None) -> Timing:
    """Run training steps of the model and return how long its units take.

    Args:
        model: one that can be planned.
        batch: of the size that is planned for.
        problem: the counted bytes of this model and batch.
        allowance: limit for the peak of each step that is run [bytes].
        loss: computes the loss from what the model returns; None is a sum.
    Raises:
        MemoryError: the allowance is too small even for the schedule of the smallest peak with a few units in other modes, or a
            training step ran out of memory.
    """
    entries = list_units(model)
    groups = [_work_key(entry, unit) for entry, unit in zip(entries, problem.units, strict=True)]
    samples: dict[tuple[Any, str], list[float]] = defaultdict(list)
    forwards: dict[Any, list[float]] = defaultdict(list)
    rest: list[float] = []
    rng, runs = random.Random(0), 0
    with preserve_schedules(model), ExitStack() as stack:
        for _ in repeat(_ROUNDS, lambda: combine_spreads([*map(find_median, samples.values())])):
            for modes in _draw_fitting_schedules(problem, entries, groups, rng, allowance):
                if not runs:
                    _warm_up(stack, model, batch, modes, loss)
                total, forward, backward = _time_step(model, batch, modes, loss)
                for k, variant in enumerate(list_variants(modes)):
                    samples[groups[k], variant].append(forward[k] + backward[k])
                    if variant == Mode.STORE:
                        forwards[groups[k]].append(forward[k])
                rest.append(total - sum(forward) - sum(backward))
                runs += 1
    seconds = {
        group: _smooth(entry, {variant: times for (key, variant), times in samples.items() if key == group})
        for entry, group in zip(entries, groups, strict=True)
    }
    return Timing(
        step_seconds=sum(seconds[group][Mode.STORE] for group in groups) + statistics.median(rest),
        forward_seconds=tuple(statistics.median(forwards[group]) for group in groups),
        extra=tuple(_extra_over_store(seconds[group]) for group in groups),
        spread=combine_spreads([*map(find_median, samples.values())]),
        runs=runs,
    )


def price_by_time(problem: Problem, timing: Timing) -> Problem:
    """Return the problem with costs in nanoseconds instead of FLOPs."""
    return reprice(problem, lambda k, variant, _: timing.extra[k][variant])


def list_variants(modes: Sequence[Mode]) -> Iterator[str]:
    """Yield the modes, with "first" in place of an `invert` that begins a run of inverted steps."""
    for before, mode in pairwise((Mode.STORE, *modes)):
        yield "first" if mode.inverts and not before.inverts else mode


def _smooth(entry: LayoutEntry, samples: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the seconds of each variant of a unit, none below one that runs less again.

    A layer that is inverted runs its inverse, and nothing of its forward: that may take less than recomputing it.
    """
    runs_forward = entry.kind != "layer" and not is_made_of_layers(entry.module)
    order = [variant for variant in (*_NOT_INVERTED, *(_INVERTED if runs_forward else ())) if variant in samples]
    medians = [(find_median(samples[variant]).seconds, len(samples[variant])) for variant in order]
    others = {variant: find_median(times).seconds for variant, times in samples.items() if variant not in order}
    return {**others, **dict(zip(order, smooth_rising(medians), strict=True))}


def _extra_over_store(seconds: Mapping[str, float]) -> dict[str, int]:
    """Return the extra time of each variant over storing; of `invert` and "first", one that was never run equals the other."""
    known = dict(seconds)
    for variant, other in (_INVERTED, _INVERTED[::-1]):
        if other in seconds:
            known.setdefault(variant, seconds[other])
    return {variant: max(0, round((each - known[Mode.STORE]) * 1e9)) for variant, each in known.items()}


def _work_key(entry: LayoutEntry, unit: Unit) -> Any:
    """Return a key that is equal for units that do the same work."""
    work = tuple((option.mode, option.kept_bytes, option.forward_bytes, option.cost) for option in unit.options)
    return type(entry.module), tuple(p.shape for p in entry.module.parameters()), work


def _draw_fitting_schedules(
    problem: Problem, entries: Sequence[LayoutEntry], groups: Sequence[Any], rng: random.Random, allowance: int
) -> list[list[Mode]]:
    """Return the schedules of a round that fits: every unit in every mode, or else four units of each group, or one.

    Where even these do not fit, the groups have their turns one after another. All other units keep as little as possible.
    """
    names = list(dict.fromkeys(groups))
    for most, parts in ((len(entries), 1), (4, 1), (1, 1), (1, 2), (1, len(names))):
        schedules = [
            modes for part in range(parts) for modes in _draw_schedules(entries, groups, rng, {*names[part::parts]}, most)
        ]
        if all(peak(problem, modes) <= allowance for modes in schedules):
            return schedules
    raise MemoryError("no training step with a few stored units fits")


def _draw_schedules(
    entries: Sequence[LayoutEntry], groups: Sequence[Any], rng: random.Random, chosen: Container[Any], most: int
) -> Iterator[list[Mode]]:
    """Yield schedules in which the first `most` units of each chosen group have every mode once, and all others keep least."""
    menus = [list(entry.modes) for entry in entries]
    seen: dict[Any, int] = defaultdict(int)
    for k, group in enumerate(groups):
        rng.shuffle(menus[k])
        if seen[group] >= most or group not in chosen:
            menus[k] = [entries[k].modes[-1]]
        seen[group] += 1
    for turn in range(4):
        yield [menu[turn % len(menu)] for menu in menus]


def _warm_up(stack: ExitStack, model: nn.Module, *step: Any) -> None:
    """Run a training step without timing it, and let the stack put back what it, and those that are timed, write to."""
    values = KeptValues([*model.parameters(), *tensors_in(step[0])])
    stack.callback(values.restore)
    with values:
        _time_step(model, *step)


def _time_step(
    model: nn.Module, batch: Any, modes: Sequence[Mode], loss: LossFunction | None, lookahead: LookaheadOption = 0
) -> tuple[float, list[float], list[float]]:
    """Run a training step; return the seconds of all of it, of each unit's forward, and of each unit's backward."""
    assign_schedule(model, modes, lookahead)
    clock = _Watch(make_clock(next(model.parameters()).device, elapsed=bool(lookahead)))
    with memory_errors(), isolated(model, batch) as inputs, leave_kept_values(), StepHooks(model, clock) as hooks:
        clock.mark("begin", -1)
        hooks.enter_forward()
        outputs = call(model, inputs)
        hooks.end_forward(outputs)
        clock.mark("loss", -1)
        total = compute_loss(loss, outputs)
        del outputs
        hooks.enter_backward()
        with leave_autocast():
            total.backward()
        clock.mark("end", -1)
        return clock.read(len(modes))


def measure_workspace(
    model: nn.Module,
    batch: Any,
    modes: Sequence[Mode],
    counted_bytes: int,
    loss: LossFunction | None = None,
    lookahead: LookaheadOption = 0,
) -> int:
    """Return by how much the allocator's peak exceeds the counted one in a training step [bytes].

    Kernels of CUDA take memory of their own while they run: the gradient of a bias 132 MiB on a device of 132 multiprocessors,
    cuBLAS 32 MiB for each stream of each thread. Blocks of the allocator are a little larger than the tensors in them. 0 on a
    CPU. Resets the allocator's peak statistics.

    Args:
        model, batch, modes, loss, lookahead: as for `measure_step_seconds`.
        counted_bytes: the counted peak of this step, without what is there when it begins.
    Raises:
        MemoryError: the step ran out of memory.
    """
    device = next(model.parameters()).device
    if not has_streams(device):
        return 0
    with preserve_schedules(model), ExitStack() as stack:
        _warm_up(stack, model, batch, modes, loss, lookahead)  # cuDNN tries kernels that it does not choose
        with memory_errors(), isolated(model, batch) as inputs, leave_kept_values():
            if device.type == "cuda":
                torch._C._cuda_clearCublasWorkspaces()  # so that they count, whatever ran before
            forget_peak(device)  # and blocks are as large as what they are made for
            before = torch.accelerator.memory_allocated(device)
            total = compute_loss(loss, call(model, inputs))
            with leave_autocast():
                total.backward()
            taken = torch.accelerator.max_memory_allocated(device) - before
    return max(0, -(-(taken - counted_bytes) // _ROUNDING) * _ROUNDING)


class _Watch:
    """The listener that notes the time at every event."""

    def __init__(self, clock: Clock):
        self._clock = clock
        self._marks: list[tuple[str, int, Any]] = []

    def mark(self, phase: str, unit: int) -> None:
        self._marks.append((phase, unit, self._clock.mark()))

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
                spans[phase][unit] += self._clock.measure(start, end)
        return self._clock.measure(self._marks[0][2], self._marks[-1][2]), spans["forward"], spans["backward"]
