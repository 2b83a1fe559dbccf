"""Nests: spans recovered in two levels, for budgets below what spans alone can reach.

A nest keeps some of its products, and nothing else but what crosses its end. When backward reaches a nest, the whole nest runs
again from its start and keeps what crosses the borders of the spans inside. Each of these spans is then recovered by itself. So
a nest costs up to two forward passes of what it does not keep, and the borders inside take memory only while backward is in it.

The spans inside are found as those of the whole graph are, from the last border to the first, for every place where a nest may
end. What a nest keeps of its products follows one rule for the whole graph: those with the most work per byte.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from revzoo.graph.pareto import prune
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
        flops: what that runs again.
        made: what that allocates.
        gradient_bytes: when backward first asks for what the nest does not keep of it; -1 if it keeps all.
    """

    option: SpanOption
    run_bytes: int
    flops: int
    made: int
    gradient_bytes: int


@dataclass(frozen=True)
class _Place:
    """Where to find the spans of a nest: a column of the front of one of its borders."""

    nests: "_Nests"
    border: int
    column: int

    def list_spans(self) -> list[SpanOption]:
        return self.nests.list_spans(self.border, self.column)


def add_nests(choices: Choices) -> None:
    """Add nests to the options of a graph."""
    for products in _list_rules(choices):
        inner: dict[tuple[int, int], _Inner] = {}
        for end in range(2, len(choices.leaves)):
            nests = _Nests(choices, products, end, inner)
            for border, option in nests.list_options():
                choices.options[choices.borders.index(choices.leaves[border])].append(option)


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


class _Nests:
    """All nests that end at one border."""

    def __init__(self, choices: Choices, products: frozenset[int], end: int, inner: dict[tuple[int, int], _Inner]):
        self._choices, self._products, self._end, self._inner = choices, products, end, inner
        self._fronts: dict[int, NDArray[np.int64]] = {end: np.zeros((6, 1), np.int64)}

    def list_options(self) -> Iterator[tuple[int, SpanOption]]:
        """Yield nests with the numbers of the borders where they begin."""
        choices, borders, end = self._choices, self._choices.leaves, self._end
        storages = choices.record.storages
        wall = max((at for at in choices.record.walls if at < borders[end]), default=0)
        first = max(borders.index(wall), end - _LONGEST)
        gradient = max((self._find(i, end).gradient_bytes for i in range(max(first, end - _LONGEST_SPAN), end)), default=0)
        after = 0  # what the nest keeps of the spans from a border on
        for border in range(end - 1, first - 1, -1):
            inside = range(borders[border], borders[border + 1])
            own = [k for i in inside for k in choices.born[i]]
            after += sum(choices.sizes[k] for k in own if k in self._products or storages[k].last_use >= borders[end])
            front = self._fronts[border] = self._find_front(border, gradient + after)
            if border < end - 1:
                yield from self._list_nests(border, front)

    def _find_front(self, border: int, base: int) -> NDArray[np.int64]:
        """Return rows of bytes, work, FLOPs, bytes made, next border and column there, for the spans from a border on."""
        columns = [np.zeros((6, 0), np.int64)]
        price = self._choices.price
        for following in range(border + 1, min(border + _LONGEST_SPAN, self._end) + 1):
            inner = self._find(border, following)
            option, rest = inner.option, self._fronts[following]
            flops, made, need = option.flops, option.made, option.need_bytes
            if following == self._end:
                if inner.gradient_bytes < 0:
                    continue
            else:
                flops, made = flops + inner.flops, made + inner.made
                need = max(need, base + inner.run_bytes)
            needs = np.maximum(need, option.kept_bytes + rest[0]) if following < self._end else np.array([need])
            full = np.full_like(needs, following)
            columns.append(
                np.stack([needs, rest[1] + price(flops, made), rest[2] + flops, rest[3] + made, full, np.arange(needs.size)])
            )
        return prune(np.concatenate(columns, axis=1), _POINTS)

    def _list_nests(self, border: int, front: NDArray[np.int64]) -> Iterator[tuple[int, SpanOption]]:
        choices = self._choices
        start, end = choices.leaves[border], choices.leaves[self._end]
        columns = [c for c in range(front.shape[1]) if front[4, c] < self._end]
        if not columns or choices.remakes_across(start, end):
            return
        span = Span(choices, start, end)
        kept = span.forced | self._products.intersection(span.own)
        size = sum(choices.sizes[k] for k in kept)
        forward = span.peak_of_forward(kept)
        for c in sorted({columns[i] for i in np.linspace(0, len(columns) - 1, _NESTS).round().astype(int)}):
            need, _, flops, made = (int(each) for each in front[:4, c])
            place = _Place(self, border, c)
            yield border, SpanOption(start, end, tuple(sorted(kept)), size, max(forward, need), flops, made, place)

    def _find(self, border: int, following: int) -> _Inner:
        inner = self._inner.get((border, following))
        if inner is None:
            inner = self._inner[border, following] = self._measure(border, following)
        return inner

    def _measure(self, border: int, following: int) -> _Inner:
        choices = self._choices
        span = Span(choices, choices.leaves[border], choices.leaves[following], is_nested=True)
        stays = self._products.intersection(span.own) | (span.forced & choices.always)
        handed = span.forced - stays
        kept = stays | handed
        _, flops, made, again = span.measure(kept)
        size = sum(choices.sizes[k] for k in kept)
        start, end = choices.leaves[border], choices.leaves[following]
        option = SpanOption(start, end, tuple(sorted(kept)), size, span.peak_of_backward(kept, again), flops, made)
        _, flops, made, again = span.measure(stays, handed)
        run = span.peak_of_recovery(stays, again, handed)
        return _Inner(option, run, flops, made, span.find_gradients(stays))

    def list_spans(self, border: int, column: int) -> list[SpanOption]:
        """Return the spans of a column of a border's front."""
        spans = []
        while border < self._end:
            following, after = (int(each) for each in self._fronts[border][4:, column])
            spans.append(self._find(border, following).option)
            border, column = following, after
        return spans
