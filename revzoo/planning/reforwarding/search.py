"""Which tensors of a recorded graph to keep and which spans to recover together: the least work within a budget.

A span is a run of atoms between two borders; borders are behind products (matrix products, convolutions) and sums. What crosses
a border is kept. Of what a span makes besides, a subset may be kept; the rest is recovered when backward reaches the span, by
running those of its atoms again that are needed. What a span needs depends on the spans before it only by what these keep, so
the cheapest sequence of spans is found by dynamic programming from the last border to the first (`timeline.py` tells how).
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch.fx import Node

from revzoo.planning.reforwarding.record import Record
from revzoo.runtime.graph.spans import Spans

_LONGEST = 24  # leaves in a span
_SUBSETS = 8  # of what a span may keep
_POINTS = 4000  # of a front
_FLOPS_PER_BYTE = 16  # as for the zoo's plans: what a device computes while it moves a byte


@dataclass(frozen=True)
class Option:
    """One span, and what it keeps.

    Args:
        start, end: its atoms.
        kept: numbers of the storages it keeps, among them all that cross its end.
        kept_bytes: their size.
        need_bytes: the larger peak of its forward and its backward, above what the spans before it keep.
        flops: of what runs again.
        made_bytes: what that allocates.
    """

    start: int
    end: int
    kept: tuple[int, ...]
    kept_bytes: int
    need_bytes: int
    flops: int
    made_bytes: int


class Choices:
    """All spans of a recorded graph that are considered.

    Args:
        record: of the graph.
        count_flops_only: whether norms and activations are free, as in published figures.
    """

    def __init__(self, record: Record, count_flops_only: bool = False):
        self.record = record
        self._price = 0 if count_flops_only else _FLOPS_PER_BYTE
        atoms, count = record.atoms, len(record.atoms)
        number = {node: i for i, atom in enumerate(atoms) for node in atom.nodes}
        of_node = _find_storages(record, number)
        self._bytes = [s.bytes for s in record.storages]
        self._born: list[list[int]] = [[] for _ in range(count)]
        self._dead: list[list[int]] = [[] for _ in range(count)]
        for k, storage in enumerate(record.storages):
            self._born[storage.born].append(k)
            if storage.maker is not None and storage.last_use < count:
                self._dead[storage.last_use].append(k)
        self._reads = [sorted({of_node[each] for each in atom.reads if each in of_node}) for atom in atoms]
        self._made = [sum(self._bytes[k] for k in born) for born in self._born]
        self._gradient = np.array(record.gradient_bytes, np.int64)
        fixed = {k for i, atom in enumerate(atoms) if not atom.is_repeatable for k in (*self._born[i], *self._reads[i])}
        self._always = {k for k, s in enumerate(record.storages) if s.is_small} | fixed
        self.borders = self._list_borders()
        self.options: list[list[Option]] = [list(self._list_options(i)) for i in range(len(self.borders) - 1)]
        self.end_bytes = record.result_bytes + int(
            self._gradient[: max(1, min(at for at in record.first_unpack if at >= 0))].max()
        )

    def _list_borders(self) -> list[int]:
        record = self.record
        inside = [i + 1 for i in range(len(record.atoms) - 1) if record.flops[i] or (len(self._reads[i]) > 1 and self._born[i])]
        return [0, *inside, len(record.atoms)]

    def _list_options(self, border: int) -> Iterator[Option]:
        start = self.borders[border]
        for end in self.borders[border + 1 : border + 1 + _LONGEST]:
            span = _Span(self, start, end)
            yield from span.list_options()

    def price(self, flops: int, made_bytes: int) -> int:
        """Return the work of FLOPs and moved bytes together [FLOPs]."""
        return flops + self._price * made_bytes


def _find_storages(record: Record, number: dict[Node, int]) -> dict[Node, int]:
    """Return the storage of every result that lies in one."""
    return {node: k for k, storage in enumerate(record.storages) for node in storage.nodes}


class _Span:
    """One span, before it is chosen what it keeps."""

    def __init__(self, choices: Choices, start: int, end: int):
        self._choices, self._start, self._end = choices, start, end
        storages = choices.record.storages
        self._own = [k for i in range(start, end) for k in choices._born[i]]
        self._forced = frozenset(
            k for k in self._own if storages[k].last_use >= end or (k in choices._always and (storages[k].saved_by or True))
        )
        self._saved = [k for k in self._own if storages[k].saved_by]

    def list_options(self) -> Iterator[Option]:
        """Yield the subsets that are worth keeping, from nothing to all that is saved."""
        choices, forced = self._choices, self._forced
        candidates = [k for k in self._saved if k not in forced]
        dropped_all = self._measure(forced)
        gains = []
        for k in candidates:
            gain = dropped_all[0] - self._measure(forced | {k})[0]
            gains.append((gain / max(1, choices._bytes[k]), k))
        gains.sort(reverse=True)
        path, kept = [(forced, dropped_all)], forced
        for _, k in gains:
            kept = kept | {k}
            measured = self._measure(kept)
            if measured[0] < path[-1][1][0]:
                path.append((kept, measured))
        if len(path) > _SUBSETS:
            chosen = np.unique(np.linspace(0, len(path) - 1, _SUBSETS).round().astype(int))
            path = [path[i] for i in chosen]
        for kept, (_, flops, made, again) in path:
            yield self._make_option(kept, flops, made, again)

    def _measure(self, kept: frozenset[int]) -> tuple[int, int, int, list[int]]:
        """Return work, FLOPs and bytes of what runs again, and which atoms."""
        choices, start = self._choices, self._start
        storages, reads = choices.record.storages, choices._reads
        need = bytearray(self._end - start)
        for k in self._saved:
            if k not in kept:
                need[storages[k].born - start] = 1
        again, flops, made = [], 0, 0
        for i in range(self._end - 1, start - 1, -1):
            if need[i - start]:
                again.append(i)
                flops += choices.record.flops[i]
                made += choices._made[i]
                for k in reads[i]:
                    if k not in kept and storages[k].born >= start:
                        need[storages[k].born - start] = 1
        again.reverse()
        return choices.price(flops, made), flops, made, again

    def _make_option(self, kept: frozenset[int], flops: int, made: int, again: Sequence[int]) -> Option:
        size = self._choices._bytes
        need = max(self._peak_of_forward(kept), self._peak_of_backward(kept, again))
        return Option(self._start, self._end, tuple(sorted(kept)), sum(size[k] for k in kept), need, flops, made)

    def _peak_of_forward(self, kept: Collection[int]) -> int:
        choices = self._choices
        storages, inner = choices.record.storages, choices.record.inner_bytes
        total = highest = 0
        for i in range(self._start, self._end):
            highest = max(highest, total + inner[i])
            for k in choices._born[i]:
                if k in kept or (storages[k].maker is not None and storages[k].last_use > i):
                    total += choices._bytes[k]
            for k in choices._dead[i]:
                if k not in kept and storages[k].born >= self._start and storages[k].born < i:
                    total -= choices._bytes[k]
        return max(highest, total)

    def _peak_of_backward(self, kept: Collection[int], again: Sequence[int]) -> int:
        choices = self._choices
        record, size = choices.record, choices._bytes
        storages, gradient = record.storages, choices._gradient
        asked = [record.first_unpack[i] for i in range(self._start, self._end) if record.first_unpack[i] >= 0]
        held = [k for k in self._own if k in kept and storages[k].released >= 0]
        dropped = [k for k in self._saved if k not in kept]
        if not asked or not (held or dropped):
            return 0
        begin = min(asked)
        end = max(begin, *(storages[k].released for k in (*held, *dropped)))
        recovery, at = 0, begin
        if dropped:
            at = min(record.first_unpack[i] for k in dropped for i in storages[k].saved_by if self._start <= i < self._end)
            alive = sum(size[k] for k in held if storages[k].released >= at)
            recovery = int(gradient[at - 1]) + alive + self._peak_of_recovery(kept, again)
        starts = [k for k in self._own if k in kept and storages[k].released < 0]
        times = np.array([storages[k].released for k in held] + [storages[k].released for k in dropped], np.int64)
        sizes = np.array([size[k] for k in held] + [size[k] for k in dropped], np.int64)
        appears = np.array([-1] * len(held) + [at] * len(dropped), np.int64)
        cuts = np.unique(np.concatenate([times + 1, [begin, at]]))
        cuts = cuts[(cuts >= begin) & (cuts <= end)]
        highest = np.maximum.reduceat(gradient[: end + 1], cuts)
        alive_at = ((times[None, :] >= cuts[:, None]) & (appears[None, :] <= cuts[:, None])) @ sizes
        return max(recovery, int((alive_at + highest).max()) + sum(size[k] for k in starts))

    def _peak_of_recovery(self, kept: Collection[int], again: Sequence[int]) -> int:
        choices = self._choices
        storages, inner = choices.record.storages, choices.record.inner_bytes
        last = {k: i for i in again for k in choices._reads[i]}
        total = highest = 0
        for i in again:
            highest = max(highest, total + inner[i])
            for k in choices._born[i]:
                if k not in kept and (storages[k].saved_by or last.get(k, -1) > i):
                    total += choices._bytes[k]
            for k in choices._reads[i]:
                own = storages[k].born >= self._start and k not in kept
                if own and last[k] == i and not storages[k].saved_by:
                    total -= choices._bytes[k]
        return max(highest, total)


class Front:
    """The cheapest sequence of spans for every budget.

    Args:
        choices: the spans.
    """

    def __init__(self, choices: Choices):
        self._choices = choices
        borders = choices.borders
        place = {at: i for i, at in enumerate(borders)}
        end = np.array([[choices.end_bytes], [0], [0], [0]], np.int64)
        fronts: list[NDArray[np.int64]] = [end]
        for options in reversed(choices.options):
            columns = []
            for number, option in enumerate(options):
                rest = fronts[len(borders) - 1 - place[option.end]]
                cost = choices.price(option.flops, option.made_bytes)
                need = np.maximum(option.need_bytes, option.kept_bytes + rest[0])
                columns.append(np.stack([need, rest[1] + cost, np.full_like(need, number), np.arange(need.size)]))
            fronts.append(_prune(np.concatenate(columns, axis=1)))
        self._fronts = fronts[::-1]

    def list_points(self) -> list[tuple[int, int]]:
        """Return pairs of peak bytes and work, by rising peak."""
        fixed = self._choices.record.fixed_bytes
        return [(int(need) + fixed, int(cost)) for need, cost in self._fronts[0][:2].T]

    def choose(self, budget: int) -> list[Option] | None:
        """Return the spans with the least work whose peak is within the budget; None if there are none."""
        front = self._fronts[0]
        column = int(np.searchsorted(front[0], budget - self._choices.record.fixed_bytes, "right")) - 1
        if column < 0:
            return None
        chosen, border = [], 0
        while border < len(self._choices.options):
            _, _, number, following = self._fronts[border][:, column]
            option = self._choices.options[border][number]
            chosen.append(option)
            border, column = self._choices.borders.index(option.end), int(following)
        return chosen

    def choose_least(self, most_flops: int) -> list[Option]:
        """Return the spans with the smallest peak among those that run at most so many FLOPs again."""
        for peak, _ in self.list_points():
            chosen = self.choose(peak)
            if chosen is not None and sum(option.flops for option in chosen) <= most_flops:
                return chosen
        raise AssertionError("the last point runs nothing again")

    def make_spans(self, chosen: Sequence[Option]) -> Spans:
        """Return chosen spans as they are run."""
        storages = self._choices.record.storages
        kept = [storages[k] for option in chosen for k in option.kept]
        return Spans(
            atoms=self._choices.record.atoms,
            ends=[option.end for option in chosen],
            kept=frozenset(storage.maker for storage in kept if storage.maker is not None),
            kept_inside=frozenset(storage.born for storage in kept if storage.maker is None and not storage.is_small),
        )


def _prune(columns: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the columns that no other beats in bytes and work, by rising bytes; of very many, those far enough apart."""
    columns = columns[:, np.lexsort((columns[1], columns[0]))]
    columns = columns[:, np.diff(np.minimum.accumulate(columns[1]), prepend=np.iinfo(np.int64).max) < 0]
    if columns.shape[1] > _POINTS:
        columns = columns[:, np.unique(np.linspace(0, columns.shape[1] - 1, _POINTS).round().astype(int))]
    return columns
