"""From the logs of a few schedules to what every unit costs in every mode, in whatever schedule.

Six steps are traced: every unit alike in each mode (nodes, which cannot invert, are selective then), and two in which
inverted steps alternate with recomputed ones, because the first step of an inverted run is recovered like a recomputed one.
From each log follows, for every unit in the mode that it had there,

    kept_bytes, holds   storages born in its forward and alive when forward has ended; the states that it keeps beside them
    forward_bytes       the most that is born in its forward and alive at once
    backward_bytes      the most that is alive in its backward beside what the units in front of it keep
    cost, made_bytes    the FLOPs that storing would not have needed, and the bytes made in backward that it would not

What a moment of one schedule holds differs from the same moment of another in what the units in front keep, and in nothing
else, so this is exact for the zoo's models (`tests/planning/test_count.py` counts random schedules). Known to be too high: bare
chains, by at most a pair of streams where the first steps are inverted alone or all are stored; a mask that nobody keeps.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, get_args

from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException

from revzoo.analysis.dry_run import isolated
from revzoo.errors import InputError, listing
from revzoo.planning.hooks import units
from revzoo.planning.problem import Option, Problem, Unit
from revzoo.planning.trace import Loss, Trace, trace
from revzoo.runtime.chain import Mode
from revzoo.runtime.drift import growth_unchecked
from revzoo.runtime.layout import LayoutEntry
from revzoo.runtime.live_bytes import Storages

_FEW_FLOPS = 4 * 10**9  # a step of so many takes a CPU less time than FakeTensors take Python
_FEW_BYTES = 2**28  # and that may be had at once without asking
_NONE: Storages = frozenset()
_ALTERNATING: tuple[tuple[Mode, Mode], ...] = (("invert", "recompute"), ("recompute", "invert"))


def count(model: nn.Module, batch: Any, loss: Loss | None = None, other_bytes: int = 0) -> Problem:
    """Return what every unit of the model holds and computes [FLOPs] in every mode, counted without running it.

    Small steps on a CPU are run after all: it is faster, and the bytes are the same.

    Args:
        batch: a tensor, a tuple or list of positional arguments, or a mapping of keyword arguments.
        loss: of what the model returns; None is a sum, which keeps nothing.
        other_bytes: what else is alive all the time: state of the optimizer, averaged weights.
    Raises:
        InputError: not a model that can be planned, compiled steps, an unusable batch, or nothing to differentiate.
    """
    parts, found = units(model), model.schedule
    if len({id(part.module) for part in parts}) < len(parts):
        raise InputError(
            "A module that is several steps cannot be planned: its calls cannot be told apart. Copy it for each step."
        )
    if compiled := [name or "model" for name, m in model.named_modules() if m._compiled_call_impl is not None]:
        raise InputError(
            f"What compiled code keeps cannot be counted. Received: compiled {listing(compiled, most=3)}. Plan first, then "
            "compile the steps: the plan stays in force."
        )
    try:
        first, *others = schedules(parts)
        traces = [_trial(model, batch, first, loss)]
        small = traces[0].marks[-1].flops <= _FEW_FLOPS and _highest(traces[0]) <= _FEW_BYTES
        fake = not small or any(p.device.type != "cpu" for p in model.parameters())
        with growth_unchecked():
            traces += [_trial(model, batch, modes, loss, fake) for modes in others]
    finally:
        model.schedule = found
    return assembled(parts, traces, other_bytes)


def schedules(parts: Sequence[LayoutEntry]) -> Iterator[list[Mode]]:
    """Yield the schedules that are traced, the stored one first."""
    for mode in get_args(Mode):
        yield [mode if part.kind == "step" or mode != "invert" else "selective" for part in parts]
    for pair in _ALTERNATING:
        yield [pair[k % 2] if part.kind == "step" else "store" for k, part in enumerate(parts)]


def counted_peak(model: nn.Module, batch: Any, modes: Sequence[Mode], loss: Loss | None = None, other_bytes: int = 0) -> int:
    """Return the most bytes alive at once in a training step with this schedule, counted without running it."""
    found = model.schedule
    try:
        return _highest(_trial(model, batch, modes, loss)) + other_bytes
    finally:
        model.schedule = found


def _trial(model: nn.Module, batch: Any, modes: Sequence[Mode], loss: Loss | None, fake: bool = True) -> Trace:
    with isolated(model, batch, fake=fake) as inputs:
        try:
            return trace(model, inputs, modes, loss)
        except DataDependentOutputException as error:
            raise InputError(
                "Bytes are counted without values. Received: a model or a loss that asks for one (.item(), float()). Take that "
                "out while planning."
            ) from error


def _highest(found: Trace) -> int:
    return max(accumulate(change for _, change in found.log))


def assembled(parts: Sequence[LayoutEntry], traces: Sequence[Trace], other_bytes: int = 0) -> Problem:
    """Return the problem that the traces of `schedules` describe."""
    stored, inverted = traces[0], traces[3]
    states = stored.states()
    # Where autograd saves nothing, nothing is dropped either, and nobody asks for the inputs.
    given = [_numbers(inputs, states) if saved else () for inputs, saved in zip(stored.inputs, stored.saved, strict=True)]
    made = (_numbers(made, inverted.states()) for made in _own_outputs(inverted))
    holds = {
        "store": [_numbers(saved, states) for saved in stored.saved],
        "selective": [inputs + own for inputs, own in zip(given, made, strict=True)],
        "recompute": given,
    }
    work = _work(stored)
    options: list[dict[tuple[str, bool], Option]] = [{} for _ in parts]
    for found in traces:
        for k, option, first in _options(found, holds, work):
            options[k].setdefault((option.mode, first), option)
    sizes = {storage: change for storage, change in reversed(stored.log) if change > 0}
    return Problem(
        units=tuple(map(_unit, parts, options, _numbered(stored.pairs[:-1], states), _numbered(stored.inputs, states))),
        sizes={number: sizes[storage] for storage, number in states.items()},
        fixed_bytes=sum(sizes.get(storage, 0) for storage in stored.fixed) + other_bytes,
        loss_bytes=_loss_bytes(stored),
        pair_after=_numbers(stored.pairs[-1], states),
    )


def _unit(part: LayoutEntry, options: dict[tuple[str, bool], Option], pair: tuple[int, ...], inputs: tuple[int, ...]) -> Unit:
    first = options.pop(("invert", True), None)
    if first is not None:
        options.setdefault(("invert", False), first)
    return Unit(part.name, pair, inputs, tuple(options.values()), first)


def _options(
    found: Trace, holds: Mapping[str, Sequence[tuple[int, ...]]], stored: Sequence[tuple[int, int]]
) -> Iterator[tuple[int, Option, bool]]:
    """Yield for every unit its option in this trace, and whether it begins a run of inverted steps there."""
    states = found.states()
    storages = {number: storage for storage, number in states.items()}
    kept, work = _kept(found), _work(found)
    forward, backward = _forward_bytes(found), {unit: span for unit, *span, _ in found.phases("backward")}
    front, private, run = set[int](), set[int](), 0
    for k, mode in enumerate(found.modes):
        given = sorted(found.inputs[k])
        held = set[int]() if mode == "invert" else {storages[number] for number in holds[mode][k]}
        if mode != "invert" and run:
            front |= found.pairs[k]
            run = 0
        others = front - (set(given) if mode == "invert" else held)
        masks = [others.union(*([s] for j, s in enumerate(given) if i >> j & 1)) for i in range(1 << len(given))]
        needs = [_peak(found, backward[k], found.fixed | private | mask) if k in backward else 0 for mask in masks]
        own = sum(kept[k].values())
        flops, made = (max(0, ours - least) for ours, least in zip(work[k], stored[k], strict=True))
        yield k, Option(mode, own, _numbers(held, states), forward[k], tuple(needs), flops, made), mode == "invert" and run == 0
        private |= kept[k].keys()
        front |= held
        run = run + 1 if mode == "invert" else 0


def _own_outputs(inverted: Trace) -> list[Storages]:
    """Return for every unit the states that it made and keeps when it is selective, which is for nodes to do.

    In this trace the inverted steps behind a node keep none of its states; a node behind it keeps what it is given.
    """
    waiting, found = inverted.alive(inverted.waiting).keys(), list[Storages]()
    following = [*zip(inverted.inputs, inverted.modes, strict=True), (_NONE, "invert")][1:]
    for mode, (front, behind), (inputs, next_mode) in zip(inverted.modes, pairwise(inverted.pairs), following, strict=True):
        made = behind - front if mode == "selective" else _NONE
        found.append((made - inputs if next_mode == "selective" else made) & waiting)
    return found


def _kept(found: Trace) -> list[dict[int, int]]:
    """Return for every unit the storages born in its forward that wait for backward and are no states."""
    waiting, states = found.alive(found.waiting), found.states()
    born = [{storage for storage, _ in found.log[start:end]} for _, start, end, _ in found.phases("forward")]
    earlier, kept = {storage for storage, _ in found.log[: found.marks[0].moment]}, []
    for storages in born:
        kept.append({s: waiting[s] for s in storages - earlier if s in waiting and s not in states})
        earlier |= storages
    return kept


def _forward_bytes(found: Trace) -> list[int]:
    """Return for every unit the most bytes born in its forward and alive at once."""
    known, needs = {storage for storage, _ in found.log[: found.marks[0].moment]}, []
    for _, start, end, _ in found.phases("forward"):
        total = highest = 0
        for storage, change in found.log[start:end]:
            if storage not in known:
                total += change
                highest = max(highest, total)
        known |= {storage for storage, _ in found.log[start:end]}
        needs.append(highest)
    return needs


def _loss_bytes(found: Trace) -> int:
    """Return what the loss needs between forward and backward above what is kept and what the model returned."""
    states, kept = found.states().keys(), {s for storages in _kept(found) for s in storages}
    start = next(mark.moment for mark in found.marks if mark.phase == "loss")
    end = next(mark.moment for mark in found.marks if mark.moment >= start and mark.phase in ("backward", "end"))
    return _peak(found, (start, end), found.fixed | kept | states)


def _peak(found: Trace, span: Sequence[int], without: Storages | set[int]) -> int:
    """Return the most bytes alive at once between two moments in storages other than `without`."""
    start, end = span
    total = highest = sum(size for storage, size in found.alive(start).items() if storage not in without)
    for storage, change in found.log[start:end]:
        if storage not in without:
            total += change
            highest = max(highest, total)
    return highest


def _work(found: Trace) -> list[tuple[int, int]]:
    """Return for every unit its FLOPs, forward and backward, and the bytes made in its backward."""
    flops, made = [0] * len(found.modes), [0] * len(found.modes)
    for unit, _, _, count in found.phases("forward"):
        flops[unit] += count
    for unit, start, end, count in found.phases("backward"):
        flops[unit] += count
        made[unit] += sum(change for _, change in found.log[start:end] if change > 0)
    return list(zip(flops, made, strict=True))


def _numbered(groups: Sequence[Storages], states: dict[int, int]) -> list[tuple[int, ...]]:
    return [_numbers(group, states) for group in groups]


def _numbers(storages: Storages | set[int], states: dict[int, int]) -> tuple[int, ...]:
    return tuple(sorted(states[storage] for storage in storages if storage in states))
