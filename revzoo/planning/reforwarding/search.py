"""Which tensors of a recorded graph to keep and which spans to recover together: the least work within a budget.

A span is a run of atoms between two borders. Long spans begin and end behind products (matrix products, convolutions) and sums;
between two such places lies a leaf. Short ones may begin and end behind any atom, which counts where the largest tensors are.
What crosses a border is kept. Of what a span makes besides, a subset may be kept; the rest is recovered when backward first
asks for some of it, by running those of its atoms again that are needed. What a span needs depends on the spans before it only
by what these keep, so the cheapest sequence of spans is found by dynamic programming from the last border to the first
(`timeline.py` tells how).
"""

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol, cast

import numpy as np
from numpy.typing import NDArray
from torch.fx import Node

from revzoo.planning.reforwarding.record import Record
from revzoo.runtime.graph.spans import Nest, Spans

_LONGEST = 24  # leaves in a span
_LONGEST_INSIDE = 6  # leaves that a span overlaps, where it begins or ends inside one
_SUBSETS = 8  # of what a span may keep
_POINTS = 4000  # of a front
FLOPS_PER_BYTE = 16  # as for the zoo's plans: what a device computes while it moves a byte


@dataclass(frozen=True)
class Option:
    """One span, and what it keeps.

    Args:
        start, end: its atoms.
        kept: numbers of the storages it keeps, among them all that cross its end.
        kept_bytes: their size.
        need_bytes: the larger peak of its forward and its backward, above what the spans before it keep.
        flops: of what runs again.
        made: what that allocates [bytes], or how long it takes where calls were timed [ns].
        inside: where to find the spans of a nest; None for a span.
    """

    start: int
    end: int
    kept: tuple[int, ...]
    kept_bytes: int
    need_bytes: int
    flops: int
    made: int
    inside: "Inside | None" = None


class Inside(Protocol):
    """The spans of a nest."""

    def list_spans(self) -> list[Option]:
        """Return them in order. What they keep is handed to them, unless the nest keeps it."""
        ...


class Choices:
    """All spans of a recorded graph that are considered.

    Args:
        record: of the graph.
        count_flops_only: whether norms and activations are free, as in published figures.
        nanoseconds: of every atom's forward, where they were measured. Then time is the price.
    """

    def __init__(self, record: Record, count_flops_only: bool = False, nanoseconds: Sequence[int] | None = None):
        self.record = record
        self._prices = (1, 0 if count_flops_only else FLOPS_PER_BYTE) if nanoseconds is None else (0, 1)
        atoms, count = record.atoms, len(record.atoms)
        of_node = {node: k for k, storage in enumerate(record.storages) for node in storage.nodes}
        self.sizes = [s.bytes for s in record.storages]
        self.array = np.array(self.sizes, np.int64)
        self.born: list[list[int]] = [[] for _ in range(count)]
        self.dead: list[list[int]] = [[] for _ in range(count)]
        for k, storage in enumerate(record.storages):
            self.born[storage.born].append(k)
            if storage.maker is not None and storage.last_use < count:
                self.dead[storage.last_use].append(k)
        self.reads = [sorted({of_node[each] for each in atom.reads if each in of_node}) for atom in atoms]
        self.made = nanoseconds or [sum(self.sizes[k] for k in born) for born in self.born]
        self.gradient = np.array(record.gradient_bytes, np.int64)
        later = (at if at >= 0 else len(self.gradient) for at in record.first_unpack)
        self.following = [len(self.gradient), *accumulate(later, min)]  # by atom: when backward first asks for one before it
        fixed = {k for i, atom in enumerate(atoms) if not atom.is_repeatable for k in (*self.born[i], *self.reads[i])}
        self.always = {k for k, s in enumerate(record.storages) if s.is_small} | fixed
        self.leaves = self._list_leaves()
        self.borders = [0, *(i + 1 for i in range(count - 1) if self.born[i] or i + 1 in self.leaves), count]
        self.options: list[list[Option]] = [list(self._list_options(i)) for i in range(len(self.borders) - 1)]

    def _list_leaves(self) -> list[int]:
        """Return the borders of leaves."""
        record = self.record
        inside = [i + 1 for i in range(len(record.atoms) - 1) if record.flops[i] or (len(self.reads[i]) > 1 and self.born[i])]
        return sorted({0, *inside, *record.walls, len(record.atoms)})

    def _list_options(self, border: int) -> Iterator[Option]:
        start, leaves = self.borders[border], self.leaves
        first = bisect_right(leaves, start)
        for end in self.borders[border + 1 :]:
            overlapped = bisect_left(leaves, end) - first + 1
            if overlapped > _LONGEST:
                break
            if overlapped <= _LONGEST_INSIDE or (leaves[first - 1] == start and leaves[first - 1 + overlapped] == end):
                yield from Span(self, start, end).list_options()
            if end in self.record.walls:
                break

    def price(self, flops: int, made: int) -> int:
        """Return the work of FLOPs and moved bytes together [FLOPs], or the nanoseconds."""
        return self._prices[0] * flops + self._prices[1] * made


class Span:
    """One span, before it is chosen what it keeps."""

    def __init__(self, choices: Choices, start: int, end: int):
        self._choices, self._start, self._end = choices, start, end
        storages = choices.record.storages
        self.own = [k for i in range(start, end) for k in choices.born[i]]
        self.forced = frozenset(k for k in self.own if storages[k].last_use >= end or k in choices.always)
        self.saved = [k for k in self.own if storages[k].saved_by]

    def list_options(self) -> Iterator[Option]:
        """Yield the subsets that are worth keeping, from nothing to all that is saved."""
        choices, forced = self._choices, self.forced
        candidates = [k for k in self.saved if k not in forced]
        dropped_all = self.measure(forced)
        gains = []
        for k in candidates:
            gain = dropped_all[0] - self.measure(forced | {k})[0]
            gains.append((gain / max(1, choices.sizes[k]), k))
        gains.sort(reverse=True)
        path, kept = [(forced, dropped_all)], forced
        for _, k in gains:
            kept = kept | {k}
            measured = self.measure(kept)
            if measured[0] < path[-1][1][0]:
                path.append((kept, measured))
        if len(path) > _SUBSETS:
            chosen = np.unique(np.linspace(0, len(path) - 1, _SUBSETS).round().astype(int))
            path = [path[i] for i in chosen]
        for kept, (_, flops, made, again) in path:
            yield self._make_option(kept, flops, made, again)

    def measure(self, kept: frozenset[int], wanted: Collection[int] | None = None) -> tuple[int, int, int, list[int]]:
        """Return work, FLOPs and bytes of what runs again, and which atoms.

        Args:
            kept: storages.
            wanted: those to be made; None for all that is saved and not kept.
        """
        choices, start = self._choices, self._start
        storages, reads = choices.record.storages, choices.reads
        need = bytearray(self._end - start)
        for k in self.saved if wanted is None else wanted:
            if k not in kept:
                need[storages[k].born - start] = 1
        again, flops, made = [], 0, 0
        for i in range(self._end - 1, start - 1, -1):
            if need[i - start]:
                again.append(i)
                flops += choices.record.flops[i]
                made += choices.made[i]
                for k in reads[i]:
                    if k not in kept and storages[k].born >= start:
                        need[storages[k].born - start] = 1
        again.reverse()
        return choices.price(flops, made), flops, made, again

    def _make_option(self, kept: frozenset[int], flops: int, made: int, again: Sequence[int]) -> Option:
        size = self._choices.sizes
        forward = self.peak_of_forward(kept)
        kept -= self._find_small(kept, again)
        need = max(forward, self.peak_of_backward(kept, again))
        return Option(self._start, self._end, tuple(sorted(kept)), sum(size[k] for k in kept), need, flops, made)

    def _find_small(self, kept: frozenset[int], again: Sequence[int]) -> set[int]:
        """Return what is kept for being small alone, and made by atoms that run again: a span drops it at its end."""
        storages, born = self._choices.record.storages, self._choices.born
        inside = {storages[k].born for k in kept if storages[k].maker is None and not storages[k].is_small}
        again = [i for i in again if i not in inside]
        return {k for i in again for k in born[i] if storages[k].is_small and storages[k].maker is None}

    def peak_of_forward(self, kept: Collection[int]) -> int:
        choices = self._choices
        storages, inner = choices.record.storages, choices.record.inner_bytes
        total = highest = 0
        for i in range(self._start, self._end):
            highest = max(highest, total + inner[i])
            for k in choices.born[i]:
                if k in kept or (storages[k].maker is not None and storages[k].last_use > i):
                    total += choices.sizes[k]
            for k in choices.dead[i]:
                if k not in kept and storages[k].born >= self._start and storages[k].born < i:
                    total -= choices.sizes[k]
        return max(highest, total)

    def peak_of_backward(self, kept: Collection[int], again: Sequence[int]) -> int:
        choices = self._choices
        record, size = choices.record, choices.sizes
        storages, gradient = record.storages, choices.gradient
        asked = [record.first_unpack[i] for i in range(self._start, self._end) if record.first_unpack[i] >= 0]
        held = [k for k in self.own if k in kept and storages[k].released >= 0]
        dropped = [k for k in self.saved if k not in kept]
        if not asked:
            return 0
        begin = min(asked)
        if not dropped:
            return self._highest(begin, [(k, -1, storages[k].released) for k in held])
        at = self.find_recovery(kept)
        # What the recovery starts from lives until then, and what no slot holds until the last slot is free.
        last = max(storages[k].released for k in dropped)
        starts = {k for i in again for k in choices.reads[i] if k in kept and storages[k].born >= self._start}
        until = last if at is None else at - 1
        lives = [(k, -1, max(storages[k].released, until if k in starts else -1)) for k in held]
        lives += [(k, -1, last) for k in starts if storages[k].released < 0]
        if at is None:
            return self._highest(begin, lives)
        lives += [(k, at, storages[k].released) for k in dropped]
        alive = sum(size[k] for k, appears, end in lives if appears < 0 and end >= at)
        passing = {k for k in starts if 0 <= storages[k].released < at}
        recovery = int(gradient[max(0, at - 1)]) + alive + self.peak_of_recovery(kept, again, passing=passing)
        return max(recovery, self._highest(begin, lives))

    def find_recovery(self, kept: Collection[int]) -> int | None:
        """Return when backward first asks for what is not kept, as a position in the log; None if it never does."""
        storages = self._choices.record.storages
        asked = (storages[k].unpacked for k in self.saved if k not in kept)
        return min((at for at in asked if at >= 0), default=None)

    def find_gradients(self, kept: Collection[int]) -> int:
        """Return the bytes of gradients at its recovery; -1 if nothing is dropped."""
        at = self.find_recovery(kept)
        return -1 if at is None else int(self._choices.gradient[max(0, at - 1)])

    def _highest(self, begin: int, lives: Sequence[tuple[int, int, int]]) -> int:
        """Return the most bytes of gradients and storages from a position in the log on, given when storages appear and end."""
        gradient = self._choices.gradient
        following = self._choices.following[self._start]  # until then backward is here, though it may need nothing more
        sizes, appear, ends = np.array(lives, np.int64).reshape(-1, 3).T
        sizes = self._choices.array[sizes]
        end = max(begin, following - 1, *ends)
        cuts = np.unique(np.concatenate([ends + 1, appear, [begin]]))
        cuts = cuts[(cuts >= begin) & (cuts <= end)]
        highest = np.maximum.reduceat(gradient[: end + 1], cuts)
        alive = ((ends[None, :] >= cuts[:, None]) & (appear[None, :] <= cuts[:, None])) @ sizes
        return int((alive + highest).max())

    def peak_of_recovery(
        self,
        kept: Collection[int],
        again: Sequence[int],
        wanted: Collection[int] | None = None,
        passing: Collection[int] = (),
    ) -> int:
        """Return the most bytes while atoms run again.

        Args:
            kept: storages that are not made.
            again: the atoms.
            wanted: what they make and does not die; None for all that is saved and not kept.
            passing: what is kept and dies when the last of the atoms has read it.
        """
        choices = self._choices
        storages, inner, copied = choices.record.storages, choices.record.inner_bytes, choices.record.copied_bytes
        last = {k: i for i in again for k in choices.reads[i]}
        stays = {k for k in self.own if storages[k].saved_by} if wanted is None else set(wanted)
        total = highest = sum(choices.sizes[k] for k in passing)
        for i in again:
            highest = max(highest, total + inner[i] + copied[i])
            for k in choices.born[i]:
                if k not in kept and (k in stays or last.get(k, -1) > i):
                    total += choices.sizes[k]
            for k in choices.reads[i]:
                own = storages[k].born >= self._start and k not in kept and k not in stays
                if (own or k in passing) and last[k] == i:
                    total -= choices.sizes[k]
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
        end = np.array([[choices.record.loss_bytes], [0], [0], [0]], np.int64)
        fronts: list[NDArray[np.int64]] = [end]
        self.lost_work = 0
        """How much less work there may be than a front tells, because it had too many points to keep them all."""
        for options in reversed(choices.options):
            columns = []
            for number, option in enumerate(options):
                rest = fronts[len(borders) - 1 - place[option.end]]
                cost = choices.price(option.flops, option.made)
                need = np.maximum(option.need_bytes, option.kept_bytes + rest[0])
                columns.append(np.stack([need, rest[1] + cost, np.full_like(need, number), np.arange(need.size)]))
            front, lost = thin(list_best(np.concatenate(columns, axis=1)), _POINTS)
            fronts.append(front)
            self.lost_work += lost
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

    def find_bottleneck(self) -> Option | None:
        """Return the span that sets the smallest peak; None if the loss does."""
        chosen = self.choose(self.list_points()[0][0])
        assert chosen is not None, "the first point has spans"
        before = list(accumulate((option.kept_bytes for option in chosen), initial=0))
        needs = [kept + option.need_bytes for kept, option in zip(before, chosen, strict=False)]
        return None if before[-1] + self._choices.record.loss_bytes > max(needs) else chosen[needs.index(max(needs))]

    def name_bottleneck(self) -> str:
        """Return where the smallest peak is, in the user's words."""
        option = self.find_bottleneck()
        if option is None:
            return "at the loss"
        first, last = (self._choices.record.atoms[at].name for at in (option.start, option.end - 1))
        return f"in {first}" if option.end == option.start + 1 else f"in the span from {first} to {last}"

    def make_spans(self, chosen: Sequence[Option]) -> Spans:
        """Return chosen spans as they are run."""
        storages = self._choices.record.storages
        kept = [storages[k] for option in chosen for k in option.kept]
        makers = self._choices.record.fixed_results | {storage.maker for storage in kept if storage.maker is not None}
        ends: list[int] = []
        nests = []
        for option in chosen:
            spans = [option] if option.inside is None else option.inside.list_spans()
            if option.inside is not None:
                results = {storages[k].maker for span in spans for k in span.kept} - makers - {None}
                nests.append(Nest(len(ends), len(ends) + len(spans), frozenset(cast(set[Node], results))))
            ends += [span.end for span in spans]
        return Spans(
            atoms=self._choices.record.atoms,
            ends=ends,
            kept=makers,
            kept_inside=frozenset(storage.born for storage in kept if storage.maker is None and not storage.is_small),
            nests=nests,
        )


def prune(columns: NDArray[np.int64], most: int) -> NDArray[np.int64]:
    """Return the columns that no other beats in bytes and work, by rising bytes; of very many, those far enough apart."""
    return thin(list_best(columns), most)[0]


def list_best(columns: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the columns that no other beats in bytes and work, by rising bytes."""
    columns = columns[:, np.lexsort((columns[1], columns[0]))]
    return columns[:, np.diff(np.minimum.accumulate(columns[1]), prepend=np.iinfo(np.int64).max) < 0]


def thin(columns: NDArray[np.int64], most: int) -> tuple[NDArray[np.int64], int]:
    """Return at most so many columns of a front, and by how much the work of a dropped one may be below that of those left."""
    if columns.shape[1] <= most:
        return columns, 0
    places = np.unique(np.linspace(0, columns.shape[1] - 1, most).round().astype(int))
    nearest = places[places.searchsorted(np.arange(columns.shape[1]), "right") - 1]  # with as many bytes or fewer
    return columns[:, places], int((columns[1, nearest] - columns[1]).max())
