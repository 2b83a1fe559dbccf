"""Nests: spans recovered in two levels, for budgets below what spans alone can reach.

A nest keeps some of its products, and nothing else but what crosses its end. When backward reaches a nest, the whole nest runs
again from its start and keeps what crosses the borders of the spans inside. Each of these spans is then recovered by itself. So
a nest costs up to two forward passes of what it does not keep, and the borders inside take memory only while backward is in it.

The spans inside are found as those of the whole graph are, from the last border to the first, for every place where a nest may
end. What a nest keeps of its products follows one rule for the whole graph: those with the most work per byte.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from revzoo.graph.equal_spans import Reruns
from revzoo.graph.pareto import find_best, thin
from revzoo.graph.progress import Report, keep_silent, walk
from revzoo.graph.span_choices import Choices, Span, SpanOption

_LONGEST_SPAN = 12  # leaves in a span of a nest
_LONGEST = 40  # leaves in a nest
_RULES = 6  # of what nests keep
_POINTS = 24  # of the front of a nest
_NESTS = 4  # of the same atoms and rule


@dataclass(frozen=True)
class _Inner:
    """A span in a nest.

    Args:
        option: the span, and what it keeps or is handed.
        run_bytes: the peak of the nest's recovery in it.
        gradient_bytes: when backward first asks for what the nest does not keep of it; -1 if it keeps all.
        first, last: what it adds where others of the nest follow, and at the nest's end: bytes, work, FLOPs and bytes made.
    """

    option: SpanOption
    run_bytes: int
    gradient_bytes: int
    first: tuple[int, int, int, int]
    last: tuple[int, int, int, int]


@dataclass(frozen=True)
class _Place:
    """Where to find the spans of a nest: a column of the front of one of its borders."""

    nests: "_Nests"
    border: int
    column: int

    def list_spans(self) -> list[SpanOption]:
        return self.nests.list_spans(self.border, self.column)


def add_nests(sets: Sequence[Choices], report: Report = keep_silent) -> None:
    """Add nests to the options of a graph, for one or more sets of what is made again across spans."""
    rules, measured = [*_list_rules(sets[0])], dict[_Key, _Inner]()
    spans = [_InnerSpans(choices, rules, measured) for choices in sets]
    for end in walk(range(2, len(sets[0].leaves)), "planning: nests of spans", report):
        before: list[_Nests] = []
        for rule in range(len(rules)):
            for inner in spans:
                nests = _Nests(inner, rule, end, before)
                for border, option in nests.list_options():
                    inner.choices.options[inner.choices.places[inner.choices.leaves[border]]].append(option)
                before.append(nests)


def _list_rules(choices: Choices) -> Iterator[frozenset[int]]:
    """Yield sets of storages that nests keep, from nothing on."""
    record = choices.record
    gains = []
    for k, storage in enumerate(record.storages):
        if storage.saved_by and storage.maker is not None and record.flops[storage.born]:
            gains.append((record.flops[storage.born] / max(1, storage.bytes), k))
    gains.sort(reverse=True)
    total = sum(choices.sizes[k] for _, k in gains)
    products: set[int] = set()
    size, rule = 0, 1
    yield frozenset()
    for (gain, k), (following, _) in pairwise([*gains, (0.0, -1)]):
        products.add(k)
        size += choices.sizes[k]
        if following < gain and size * _RULES >= rule * total:
            yield frozenset(products)
            rule = size * _RULES // max(1, total) + 1


_Key = tuple[int, int, frozenset[int], frozenset[int]]


class _InnerSpans:
    """The spans in nests.

    Args:
        choices: of the graph.
        rules: what nests keep of the products.
        measured: those that were measured, by borders, what stays and what they must keep.
    """

    def __init__(self, choices: Choices, rules: Sequence[frozenset[int]], measured: dict[_Key, _Inner]):
        self.choices, self.rules, self._measured = choices, rules, measured
        self.product_bits = [sum(1 << choices.place[k] for k in products) for products in rules]
        self._known: list[list[list[_Inner]]] = [[] for _ in choices.leaves]  # by first border, length and rule

    def find(self, rule: int, border: int, following: int) -> _Inner:
        """Return the span between two leaves' borders."""
        return self.list_from(border, following)[-1][rule]

    def list_from(self, border: int, following: int) -> list[list[_Inner]]:
        """Return the spans from a border on up to another, by length and rule."""
        spans = self._known[border]
        while len(spans) < following - border:
            spans.append(self._measure(border, border + 1 + len(spans)))
        return spans[: following - border]

    def _measure(self, border: int, following: int) -> list[_Inner]:
        choices = self.choices
        span = Span(choices, choices.leaves[border], choices.leaves[following], is_nested=True)
        always = span.forced & choices.always
        stays = [products.intersection(span.own) | always for products in self.rules]
        keys = {each: (border, following, each, span.forced) for each in stays}
        if missing := [each for each, key in keys.items() if key not in self._measured]:
            for each, inner in zip(missing, _measure(choices, span, missing), strict=True):
                self._measured[keys[each]] = inner
        return [self._measured[keys[each]] for each in stays]


def _measure(choices: Choices, span: Span, stays: Sequence[frozenset[int]]) -> list[_Inner]:
    """Return a span with each choice of what the nest keeps of it. The rest of what the span must keep is handed to it."""
    plans = [(each | span.forced, Reruns(choices, span, each | span.forced).list_atoms()) for each in stays]
    measured = []
    for each, (kept, again), peak in zip(stays, plans, span.list_backward_peaks(plans), strict=True):
        size, own = span.count_bytes(kept), choices.count(again)
        option = SpanOption(span.start, span.end, tuple(sorted(kept)), size, peak, *own[1:])
        again = Reruns(choices, span, each, kept - each).list_atoms()
        work, flops, made = choices.count(again)
        run = span.peak_of_recovery(each, again, kept - each)
        first = size, own[0] + work, own[1] + flops, own[2] + made
        measured.append(_Inner(option, run, span.find_gradients(each), first, (0, *own)))
    return measured


class _Nests:
    """All nests that end at one border.

    Args:
        inner: their spans.
        rule: its number.
        end: the border, as a number.
        before: nests of other rules or for other sets of what is made again. Where products and roots are the same, fronts are.
    """

    def __init__(self, inner: _InnerSpans, rule: int, end: int, before: Sequence["_Nests"]):
        self._choices, self._inner, self._rule, self._end = inner.choices, inner, rule, end
        self._before = list(before)
        self._fronts: dict[int, NDArray[np.int64]] = {end: np.zeros((6, 1), np.int64)}

    def list_options(self) -> Iterator[tuple[int, SpanOption]]:
        """Yield nests with the numbers of the borders where they begin."""
        choices, borders, end = self._choices, self._choices.leaves, self._end
        storages, products = choices.record.storages, self._inner.rules[self._rule]
        wall = max((at for at in choices.record.walls if at < borders[end]), default=0)
        first = max(borders.index(wall), end - _LONGEST)
        nearest = range(max(first, end - _LONGEST_SPAN), end)
        gradient = max((self._inner.find(self._rule, i, end).gradient_bytes for i in nearest), default=0)
        after = 0  # what the nest keeps of the spans from a border on
        forward = _Forward(choices, borders[first], borders[end])
        for border in range(end - 1, first - 1, -1):
            own = [k for i in range(borders[border], borders[border + 1]) for k in choices.born[i]]
            after += sum(choices.sizes[k] for k in own if k in products or storages[k].last_use >= borders[end])
            forward.extend(own, products)
            self._before = [each for each in self._before if self._is_like(each, min(border, nearest.start))]
            alike = next(iter(self._before), None)
            if alike is not None:
                front = self._fronts[border] = alike._fronts[border]
            else:
                front = self._fronts[border] = self._find_front(border, gradient + after)
            if border < end - 1 and (alike is None or alike._choices is not choices):
                yield from self._list_nests(border, front, forward)

    def _find_front(self, border: int, base: int) -> NDArray[np.int64]:
        """Return rows of bytes, work, FLOPs, bytes made, next border and column there, for the spans from a border on."""
        stop = min(border + _LONGEST_SPAN, self._end)
        spans = [of_length[self._rule] for of_length in self._inner.list_from(border, stop)]
        rows = [(max(each.option.need_bytes, base + each.run_bytes), *each.first) for each in spans]
        if stop == self._end:
            rows[-1:] = [(spans[-1].option.need_bytes, *spans[-1].last)] if spans[-1].gradient_bytes >= 0 else []
        if not rows:
            return np.zeros((6, 0), np.int64)
        fronts = [self._fronts[border + 1 + i] for i in range(len(rows))]
        counts = [front.shape[1] for front in fronts]
        rest, number = np.concatenate(fronts, axis=1), np.repeat(np.arange(len(rows)), counts)
        need, kept, price, flops, made = np.array(rows, np.int64).T
        need, work = np.maximum(need[number], kept[number] + rest[0]), rest[1] + price[number]
        best = find_best(need, work)
        best = thin(np.array([need[best], work[best], best]), _POINTS)[0][2]
        number = number[best]
        column = best - (np.cumsum(counts) - counts)[number]
        more = flops[number], made[number], border + 1 + number, column
        return np.array([need[best], work[best], rest[2, best] + more[0], rest[3, best] + more[1], *more[2:]])

    def _is_like(self, other: "_Nests", border: int) -> bool:
        """Return whether nests from a border on consist of the same spans."""
        choices, leaves = self._choices, self._choices.leaves
        start, end = choices.first[leaves[border]], choices.first[leaves[self._end]]
        inside = (1 << end) - (1 << start)
        bits = self._inner.product_bits
        differing = (bits[self._rule] ^ bits[other._rule]) & inside
        return not differing and (other._choices is choices or choices.is_alike(border, self._end))

    def _list_nests(self, border: int, front: NDArray[np.int64], forward: "_Forward") -> Iterator[tuple[int, SpanOption]]:
        choices = self._choices
        start, end = choices.leaves[border], choices.leaves[self._end]
        columns = np.flatnonzero(front[4] < self._end).tolist()
        if not columns or _remakes_across(choices, start, end):
            return
        kept, size, highest = tuple(forward.kept), forward.kept_bytes, forward.find_peak(start)
        last = len(columns) - 1
        for c in sorted({columns[round(i * last / (_NESTS - 1))] for i in range(_NESTS)}):
            need, _, flops, made = front[:4, c].tolist()
            place = _Place(self, border, c)
            yield border, SpanOption(start, end, kept, size, max(highest, need), flops, made, place)

    def list_spans(self, border: int, column: int) -> list[SpanOption]:
        """Return the spans of a column of a border's front."""
        spans = []
        while border < self._end:
            following, after = self._fronts[border][4:, column].tolist()
            spans.append(self._inner.find(self._rule, border, following).option)
            border, column = following, after
        return spans


def _remakes_across(choices: Choices, start: int, end: int) -> bool:
    """Return whether some atoms read what is made again for them, or make what is made again for others."""
    storages = choices.record.storages
    return any(
        start <= storages[k].born < end <= storages[k].last_use
        or (storages[k].born < start and any(start <= i < end for i in readers))
        for k, readers in choices.readers.items()
    )


class _Forward:
    """What nests that end at one border keep, and the peak of their forward; it grows towards their start.

    Args:
        choices: of the graph.
        first, end: the longest nest.
    """

    def __init__(self, choices: Choices, first: int, end: int):
        self._choices, self._first, self._end = choices, first, end
        # What the atoms inside have allocated before one of them, and the peak in it.
        self._before = np.array([*choices.record.inner_bytes[first:end], 0], np.int64)
        self.kept: list[int] = []
        self.kept_bytes = 0

    def extend(self, born: Sequence[int], products: frozenset[int]) -> None:
        """Take in the storages of the atoms before, and keep those that are products or cross the end."""
        choices = self._choices
        for k in born:
            storage, size = choices.record.storages[k], choices.sizes[k]
            crosses = storage.last_use >= self._end and k not in choices.remade.recipes
            until = self._end
            if crosses or k in products or k in choices.always:
                self.kept.append(k)
                self.kept_bytes += size
            else:
                until = min(until, storage.born if storage.maker is None else storage.last_use)
            self._before[storage.born + 1 - self._first : until + 1 - self._first] += size

    def find_peak(self, start: int) -> int:
        """Return the peak of the nest that begins at `start`, the last that was taken in."""
        storages = self._choices.record.storages
        remade = (k for k in self._choices.remade.recipes if storages[k].born < start <= storages[k].last_use)
        return sum(self._choices.sizes[k] for k in remade) + int(self._before[start - self._first :].max())
