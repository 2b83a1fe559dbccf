"""The cheapest sequence of spans for every budget.

What a span needs depends on the spans before it only by what these keep, so the cheapest sequence is found by dynamic
programming from the last border to the first (`timeline.py` tells how), once for each set of what is made again across spans.
"""

from collections.abc import Sequence
from itertools import accumulate, groupby
from typing import cast

import numpy as np
from numpy.typing import NDArray
from torch.fx import Node

from revzoo.graph.equal_spans import add_spans
from revzoo.graph.nesting import add_nests
from revzoo.graph.pareto import find_best, find_unbeaten, list_best, thin
from revzoo.graph.progress import Report, keep_silent
from revzoo.graph.remaking import list_remade
from revzoo.graph.span_choices import Choices, SpanOption
from revzoo.graph.spans import Nest, Spans
from revzoo.graph.step_record import Record

_POINTS = 2000  # of a front
_BLOCK = 16  # points that are compared at once
_NEAR = 1.25  # up to so many times the smallest need of spans alone, the rest takes less work by more than a thousandth


def find_front(
    record: Record,
    count_flops_only: bool = False,
    nanoseconds: Sequence[int] | None = None,
    report: Report = keep_silent,
    budget: int | None = None,
) -> "Front":
    """Return the front of all plans of a recorded graph.

    Args:
        record, count_flops_only, nanoseconds: as for `Choices`.
        report: as for `plan_module`.
        budget: what is looked for. Far above the smallest peak of spans alone, these are searched alone: what several of them
            make again, and nests, take longest to search.
    """
    choices = [Choices(record, count_flops_only, nanoseconds)]
    add_spans(choices, report)
    if budget is not None:
        front = Front(choices)
        if budget - record.fixed_bytes > _NEAR * (front.list_points()[0][0] - record.fixed_bytes):
            return front
    others = [Choices(record, count_flops_only, nanoseconds, remade) for remade in list_remade(choices[0])]
    add_spans(others, report)
    choices += others
    add_nests(choices, report)
    report("planning: sequences of spans")
    return Front(choices)


class Front:
    """The cheapest sequence of spans for every budget.

    Args:
        choices: the spans, for one or more sets of what is made again across spans. All are of the same record.
    """

    def __init__(self, choices: Sequence[Choices]):
        self._record = choices[0].record
        self._sequences = [_Sequences(each) for each in choices]
        fronts = [each.fronts[0][:2] for each in self._sequences]
        columns = [
            np.stack([need, work, np.full_like(need, number), np.arange(need.size)])
            for number, (need, work) in enumerate(fronts)
        ]
        self._points = list_best(np.concatenate(columns, axis=1))
        self.lost_work = max(each.lost_work for each in self._sequences)
        """How much less work there may be than a front tells, because it had too many points to keep them all."""

    def list_points(self) -> list[tuple[int, int]]:
        """Return pairs of peak bytes and work, by rising peak."""
        fixed = self._record.fixed_bytes
        return [(int(need) + fixed, int(cost)) for need, cost in self._points[:2].T]

    def choose(self, budget: int) -> list[SpanOption] | None:
        """Return the spans with the least work whose peak is within the budget; None if there are none."""
        column = int(np.searchsorted(self._points[0], budget - self._record.fixed_bytes, "right")) - 1
        if column < 0:
            return None
        _, _, number, place = (int(each) for each in self._points[:, column])
        return self._sequences[number].list_options(place)

    def choose_least(self, most_flops: int) -> list[SpanOption]:
        """Return the spans with the smallest peak, to a thousandth, among those that run at most `most_flops` again."""
        for peak, _ in self.list_points():
            for budget in (peak + peak // 1000, peak):  # the last bytes may cost more than all before them
                chosen = self.choose(budget)
                if chosen is not None and sum(option.flops for option in chosen) <= most_flops:
                    return chosen
        raise AssertionError("the last point runs nothing again")

    def name_bottleneck(self) -> str:
        """Return where the smallest peak is, in the user's words."""
        chosen = self.choose(self.list_points()[0][0]) or ()
        before = list(accumulate((option.kept_bytes for option in chosen), initial=0))
        needs = [kept + option.need_bytes for kept, option in zip(before, chosen, strict=False)]
        if before[-1] + self._record.loss_bytes > max(needs):
            return "at the loss"
        option = chosen[needs.index(max(needs))]
        first, last = (self._record.atoms[at].name for at in (option.start, option.end - 1))
        return f"in {first}" if option.end == option.start + 1 else f"in the span from {first} to {last}"

    def make_spans(self, chosen: Sequence[SpanOption]) -> Spans:
        """Return chosen spans as they are run."""
        storages = self._record.storages
        kept = [storages[k] for option in chosen for k in option.kept]
        makers = self._record.fixed_results | {storage.maker for storage in kept if storage.maker is not None}
        ends: list[int] = []
        nests = []
        for option in chosen:
            spans = [option] if option.inside is None else option.inside.list_spans()
            if option.inside is not None:
                results = {storages[k].maker for span in spans for k in span.kept} - makers - {None}
                nests.append(Nest(len(ends), len(ends) + len(spans), frozenset(cast(set[Node], results))))
            ends += [span.end for span in spans]
        return Spans(
            atoms=self._record.atoms,
            ends=ends,
            kept=makers,
            kept_inside=frozenset(storage.born for storage in kept if storage.maker is None and not storage.is_small),
            nests=nests,
        )


class _Sequences:
    """The cheapest sequences of the spans of one set.

    Attributes:
        fronts: of sequences from every border to the end: rows of bytes, work, number of the first option and the next column.
        lost_work: as of a `Front`.
    """

    def __init__(self, choices: Choices):
        self._choices = choices
        borders = choices.borders
        end = np.array([[choices.record.loss_bytes], [0], [0], [0]], np.int64)
        fronts: list[NDArray[np.int64]] = [end]
        self.lost_work = 0
        for options in reversed(choices.options):
            options.sort(key=lambda option: option.end)
            groups = []
            for end, group in groupby(options, lambda option: option.end):
                rows = [(o.kept_bytes, o.need_bytes, choices.price(o.flops, o.made)) for o in group]
                groups.append((np.array(rows, np.int64).T, fronts[len(borders) - 1 - choices.places[end]]))
            front, lost = thin(_extend(groups), _POINTS)
            fronts.append(front)
            self.lost_work += lost
        self.fronts = fronts[::-1]

    def list_options(self, column: int) -> list[SpanOption]:
        """Return the options of a sequence from the first border on."""
        chosen, border = [], 0
        while border < len(self._choices.options):
            _, _, number, following = self.fronts[border][:, column]
            option = self._choices.options[border][number]
            chosen.append(option)
            border, column = self._choices.places[option.end], int(following)
        return chosen


def _extend(groups: Sequence[tuple[NDArray[np.int64], NDArray[np.int64]]]) -> NDArray[np.int64]:
    """Return the front of sequences that begin with one of some options, with numbers of options and columns.

    Few options have a part in it. So blocks of points are compared first: no point of a block takes less than the bytes of its
    first and the work of its last.

    Args:
        groups: bytes kept, bytes needed and price of options with the same end, and the front from there on.
    """
    counts = [options.shape[1] for options, _ in groups]
    lengths = [rest.shape[1] for _, rest in groups]
    kept, need, price = np.concatenate([options for options, _ in groups], axis=1)
    begin = np.repeat(np.cumsum(lengths) - lengths, counts)  # by option: of its front among all points
    points, length = np.concatenate([rest[:2] for _, rest in groups], axis=1), np.repeat(lengths, counts)
    number = np.repeat(np.arange(kept.size), -(-length // _BLOCK))
    block = _BLOCK * np.concatenate(
        [np.tile(np.arange(-(-size // _BLOCK)), count) for size, count in zip(lengths, counts, strict=True)]
    )

    def add(number: NDArray[np.int64], column: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return bytes and work of options, each with a point of its front."""
        size, work = points[:, begin[number] + column]
        return np.stack([np.maximum(size + kept[number], need[number]), work + price[number]])

    size, most = add(number, block)
    least = add(number, np.minimum(block + _BLOCK, length[number]) - 1)[1]
    few = find_best(size, most)
    left = find_unbeaten(size, least, size[few], most[few])
    number = np.repeat(number[left], _BLOCK)
    column = np.minimum((block[left, None] + np.arange(_BLOCK)).ravel(), length[number] - 1)
    size, work = add(number, column)
    best = find_best(size, work)
    return np.stack([size[best], work[best], number[best], column[best]])
