"""Derive each unit's memory and FLOPs in every mode from the traces of a few schedules (`count.py`).

From each log follows, for every unit in the mode that it had there,

    kept_bytes          storages that appeared in its forward and are alive between forward and backward, without states
    kept_states         the states that it keeps
    left_bytes          storages that appeared in its forward and are alive until forward ends, without those it keeps
    forward_bytes       peak of the storages that appeared in its forward, and of what earlier ones have left for a while
    backward_bytes      peak of its backward above what the preceding units keep
    cost, made_bytes    FLOPs, and bytes allocated in backward, beyond those that storing needs

At the same place of the training step, two schedules differ only in what the preceding units keep. The numbers therefore hold
for every schedule, exactly for the zoo's models (`tests/planning/test_count.py` counts random schedules). Known to come out too
high: bare chains, by at most a pair of streams, where the first steps
are inverted alone or all steps are stored; and a mask that no unit keeps.

What an inverted layer takes also depends on its place in the run and on whether it gets halves of the channels. Of all places
that the traces show, the one that takes most counts everywhere, so plans of networks of layers are predicted too
high, by a fifth at most, until they are counted. The inverse of layer k runs when layer k-1 is unpacked, but counts in layer
k's backward.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from operator import attrgetter

from revzoo.planning.profiling.trace import Trace
from revzoo.planning.solvers.problem import Option, Problem, Unit, tabulate
from revzoo.runtime.layout import LayoutEntry
from revzoo.runtime.live_bytes import Storages
from revzoo.runtime.mode import Mode

_NONE: Storages = frozenset()


def build_problem(layout: Sequence[LayoutEntry], traces: Sequence[Trace], other_bytes: int = 0) -> Problem:
    """Return the problem that the traces of `list_traced_schedules` describe."""
    entries = [entry for entry in layout if entry.is_unit]
    stored, recomputed, inverted = traces[0], traces[2], traces[3]  # in the order of MODES
    states = stored.number_states()
    # Where autograd saves nothing, a unit that recomputes does not need its inputs either.
    given = [_number(inputs, states) if saved else () for inputs, saved in zip(stored.inputs, stored.saved, strict=True)]
    made = (_number(made, inverted.number_states(stored)) for made in _kept_outputs(inverted))
    kept_states: dict[Mode, list[tuple[int, ...]]] = {
        Mode.STORE: [
            _number(saved, states) if entry.can_drop else rest
            for entry, saved, rest in zip(entries, stored.saved, _states_in_rests(recomputed), strict=True)
        ],
        Mode.SELECTIVE: [inputs + outputs for inputs, outputs in zip(given, made, strict=True)],
        Mode.RECOMPUTE: given,
        Mode.INVERT: [()] * len(entries),
    }
    stored_work = _count_work(stored)
    sizes = {storage: change for storage, change in reversed(stored.log) if change > 0}
    sizes_of_states = {number: sizes[storage] for storage, number in states.items()}
    alive = [tuple(sorted(numbers)) for numbers in _list_alive_states(traces)]
    options: list[dict[tuple[Mode, bool], Option]] = [{} for _ in entries]
    for traced in traces:
        numbers = traced.number_states(stored)
        for k, option, context in _build_options(traced, numbers, kept_states, stored_work):
            if not entries[k].can_drop:  # steps that drop something hold on to arguments that it makes, such as masks
                shown = options[k].get((Mode.STORE, False), option)
                options[k][Mode.STORE, False] = max(shown, option, key=attrgetter("kept_bytes"))
                continue
            place = option.mode, context.begins_run
            shown = options[k].setdefault(place, option)
            if option.mode.inverts and entries[k].kind == "layer":
                larger = max(shown, option, key=lambda each: max(each.backward_bytes))
                forward_bytes = max(shown.forward_bytes, option.forward_bytes)
                options[k][place] = replace(larger, forward_bytes=forward_bytes)
    pairs = [_number(pair, states) for pair in stored.pairs]
    inputs = [_number(given, states) for given in stored.inputs]
    return Problem(
        units=tuple(map(_build_unit, entries, options, pairs[:-1], inputs, alive)),
        sizes=sizes_of_states,
        fixed_bytes=sum(sizes.get(storage, 0) for storage in stored.fixed) + other_bytes,
        loss_bytes=_loss_peak(stored),
        pair_after=pairs[-1],
        is_left_at_loss=any(map(_freed_casts, traces)),
    )


def _build_unit(
    entry: LayoutEntry,
    options: dict[tuple[Mode, bool], Option],
    pair: tuple[int, ...],
    inputs: tuple[int, ...],
    alive: tuple[int, ...],
) -> Unit:
    first = options.pop((Mode.INVERT, True), None)
    if first is not None:
        options.setdefault((Mode.INVERT, False), first)
    return Unit(entry.name, pair, inputs, tuple(options.values()), first, alive)


def _build_options(
    traced: Trace,
    numbers: Mapping[int, int],
    kept_states: Mapping[Mode, Sequence[tuple[int, ...]]],
    stored_work: Sequence[tuple[int, int]],
) -> Iterator[tuple[int, Option, "_Context"]]:
    """Yield for every unit its index, its option in this trace, and what precedes it there."""
    kept, work, forward, left = _kept_storages(traced), _count_work(traced), _forward_peaks(traced), _left_storages(traced)
    backward = {unit: span for unit, *span, _ in traced.phases("backward")}
    for k, context in enumerate(_list_contexts(traced, numbers, kept_states)):
        peaks = context.tabulate(partial(traced.peak, backward[k]) if k in backward else lambda without: 0)
        flops, made_bytes = (max(0, value - stored) for value, stored in zip(work[k], stored_work[k], strict=True))
        held = _number(context.held, numbers)
        option = Option(traced.modes[k], sum(kept[k].values()), held, forward[k], peaks, flops, made_bytes)
        yield k, replace(option, left_bytes=sum(left[k].values())), context


@dataclass(frozen=True)
class _Context:
    """What surrounds a unit in a trace.

    Args:
        begins_run: whether it begins a run of inverted units.
        preceding: storages that the preceding units keep, and fixed ones.
        held: storages of the states that the unit itself keeps.
        others: storages that do not count in its backward, whatever the preceding units keep of its inputs.
        inputs: storages of each of its inputs.
    """

    begins_run: bool
    preceding: set[int]
    held: set[int]
    others: set[int]
    inputs: list[set[int]]

    def tabulate(self, measure: Callable[[set[int]], int]) -> Sequence[int]:
        """Return what is measured for each subset of the inputs that preceding units may keep, as in `Option.backward_bytes`.

        Args: measure: returns bytes, given the storages that do not count.
        """

        def compute(subset: int) -> int:
            return measure(self.others.union(*(storages for j, storages in enumerate(self.inputs) if subset >> j & 1)))

        return tabulate(len(self.inputs), compute)


def _list_contexts(
    traced: Trace, numbers: Mapping[int, int], kept_states: Mapping[Mode, Sequence[tuple[int, ...]]]
) -> Iterator[_Context]:
    """Yield the context of every unit."""
    storages: dict[int, set[int]] = {}
    for storage, number in numbers.items():
        storages.setdefault(number, set()).add(storage)
    kept = _kept_storages(traced)
    held_before, own, run = set[int](), set[int](traced.fixed), 0  # states and other storages kept by the preceding units
    for k, mode in enumerate(traced.modes):
        given = [storages[number] for number in _number(traced.inputs[k], numbers)]
        held = set[int]().union(*(storages[number] for number in kept_states[mode][k]))
        if run and not mode.inverts:
            held_before |= traced.pairs[k]
            run = 0
        others = own | held_before - (traced.inputs[k] if mode.inverts else held)
        yield _Context(mode.inverts and run == 0, own | held_before, held, others, given)
        own |= kept[k].keys()
        held_before |= held
        run = run + 1 if mode.inverts else 0


def _list_alive_states(traces: Sequence[Trace]) -> Iterator[set[int]]:
    """Yield for every unit the states that are alive when its forward begins, in every one of the schedules, as numbers.

    A unit that keeps one of them in every mode is among the preceding ones, and does so in any schedule.
    """
    numbers = [traced.number_states(traces[0]) for traced in traces]
    for starts in zip(*([start for _, start, *_ in traced.phases("forward")] for traced in traces), strict=True):
        alive = (traced.alive(start).keys() for traced, start in zip(traces, starts, strict=True))
        yield set.intersection(*({of[s] for s in storages & of.keys()} for of, storages in zip(numbers, alive, strict=True)))


def _kept_outputs(inverted: Trace) -> list[Storages]:
    """Return for every unit the states that it makes and, when it is selective, keeps; only nodes do.

    In this trace the inverted steps after a node keep none of its states; a node after it keeps its own inputs.
    """
    waiting, outputs = inverted.alive(inverted.backward_start).keys(), list[Storages]()
    following = [*zip(inverted.inputs, inverted.modes, strict=True), (_NONE, Mode.INVERT)][1:]
    for mode, (before, after), (inputs, next_mode) in zip(inverted.modes, pairwise(inverted.pairs), following, strict=True):
        made = after - before if mode is Mode.SELECTIVE else _NONE
        outputs.append((made - inputs if next_mode is Mode.SELECTIVE else made) & waiting)
    return outputs


def _states_in_rests(recomputed: Trace) -> Iterator[tuple[int, ...]]:
    """Yield for every unit the states among its inputs that are kept until backward by what follows, where units recompute.

    Recomputed steps keep the states before them. The last state of a list of blocks is kept, if at all, by what the network
    computes after the list.
    """
    waiting, numbers = recomputed.alive(recomputed.backward_start).keys(), recomputed.number_states()
    for inputs in recomputed.inputs:
        yield _number(inputs & waiting, numbers)


def _kept_storages(traced: Trace) -> list[dict[int, int]]:
    """Return for every unit the storages, with their bytes, that it keeps for backward and that are not states."""
    waiting, states = traced.alive(traced.backward_start), traced.number_states()
    touched = [{storage for storage, _ in traced.log[start:end]} for _, start, end, _ in traced.phases("forward")]
    earlier, kept = {storage for storage, _ in traced.log[: traced.marks[0].position]}, []
    for storages in touched:
        kept.append({s: waiting[s] for s in storages - earlier if s in waiting and s not in states})
        earlier |= storages
    return kept


def _left_storages(traced: Trace) -> list[dict[int, int]]:
    """Return for every unit the storages of its forward, with bytes, that live until forward ends though backward needs none.

    These are casts of weights under autocast. Where only the model's forward is inside it, they are freed before the loss.
    """
    kept, earlier = _kept_storages(traced), {storage for storage, _ in traced.log[: traced.marks[0].position]}
    others, spans = earlier.union(traced.number_states(), *kept), [span for _, *span, _ in traced.phases("forward")]
    alive, left = _freed_casts(traced) or traced.alive(spans[-1][0]), list[dict[int, int]]()
    for start, end in spans:
        new = {storage for storage, _ in traced.log[start:end]} - others
        left.append({storage: alive[storage] for storage in new if storage in alive})
        others |= new
    return left


def _freed_casts(traced: Trace) -> dict[int, int]:
    """Return the storages, with their bytes, that are freed where the step leaves autocast, between loss and backward."""
    before, after = traced.alive(traced.loss_end), traced.alive(traced.backward_start)
    return {storage: before[storage] for storage in before.keys() - after.keys()}


def _forward_peaks(traced: Trace) -> list[int]:
    """Return for every unit the peak of its forward, without the states and what other units keep that was there before.

    What earlier forwards have left and no backward needs is counted: on a grid, the streams before they were rounded.
    """
    known, peaks = {storage for storage, _ in traced.log[: traced.marks[0].position]}, []
    lasting = known.union(traced.number_states(), *_kept_storages(traced), *_left_storages(traced))
    for _, start, end, _ in traced.phases("forward"):
        peaks.append(traced.peak((start, end), known & lasting))
        known |= {storage for storage, _ in traced.log[start:end]}
    return peaks


def _loss_peak(traced: Trace) -> int:
    """Return the loss's peak bytes between forward and backward, beyond what units keep and the model returned."""
    states = traced.number_states().keys()
    kept = set[int]().union(*_kept_storages(traced), *_left_storages(traced))
    start = next(mark.position for mark in traced.marks if mark.phase == "loss")
    end = next(mark.position for mark in traced.marks if mark.position >= start and mark.phase in ("backward", "end"))
    return traced.peak((start, end), traced.fixed | kept | states)


def _count_work(traced: Trace) -> list[tuple[int, int]]:
    """Return for every unit its FLOPs, forward and backward together, and the bytes allocated in its backward."""
    flops, made = [0] * len(traced.modes), [0] * len(traced.modes)
    for unit, _, _, more in traced.phases("forward"):
        flops[unit] += more
    for unit, start, end, more in traced.phases("backward"):
        flops[unit] += more
        made[unit] += sum(change for _, change in traced.log[start:end] if change > 0)
    return list(zip(flops, made, strict=True))


def _number(storages: Storages | set[int], states: Mapping[int, int]) -> tuple[int, ...]:
    """Return the numbers of those storages that are states, rising."""
    return tuple(sorted({states[storage] for storage in storages if storage in states}))
