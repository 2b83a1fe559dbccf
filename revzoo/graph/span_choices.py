"""Which tensors of a recorded graph to keep and which spans to recover together: the least work within a budget.

A span is a run of atoms between two borders. Long spans begin and end after products (matrix products, convolutions) and sums;
the atoms between two such places are a leaf. Short spans may begin and end after any atom, which matters where the largest
tensors are. What crosses a border is kept, unless later spans make it again (`remaking.py`). A span may keep some of its other
tensors; the rest is recovered when backward first asks for some of it, by running the atoms again that are needed.
`equal_spans.py` goes through all spans, and `front.py` finds the cheapest sequence of them.
"""

from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from revzoo.analysis.flops import FLOPS_PER_BYTE
from revzoo.graph.step_record import Record, find_first

_SUBSETS = 8  # of what a span may keep


class SpanOption(NamedTuple):
    """One span, and what it keeps.

    Args:
        start, end: its atoms.
        kept: numbers of the storages it keeps, among them all that cross its end and are not remade.
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

    def list_spans(self) -> list[SpanOption]:
        """Return them in order. What they keep is handed to them, unless the nest keeps it."""
        ...


@dataclass(frozen=True)
class Remade:
    """Tensors that later spans need, but that are not kept: each of these spans makes them again.

    Args:
        recipes: by number of the storage: the atoms that make it.
        roots: what these atoms start from. Every plan keeps it.
    """

    recipes: Mapping[int, tuple[int, ...]]
    roots: frozenset[int]


NOTHING = Remade({}, frozenset())


Shape = tuple[tuple[int, ...], int, int, int | None, int, int]
"""What a span may keep, wherever it is in the graph.

Places of the kept storages among its own, their bytes, the peak of forward, that of backward above the gradients before it
(None: it has none), FLOPs, and `made` of a `SpanOption`.
"""


class Choices:
    """All spans of a recorded graph that are considered.

    Args:
        record: of the graph.
        count_flops_only: whether norms and activations are free, as in published figures.
        nanoseconds: of every atom's forward, where they were measured. Then time is the price.
        remade: what crosses spans and is made again.
    """

    def __init__(
        self,
        record: Record,
        count_flops_only: bool = False,
        nanoseconds: Sequence[int] | None = None,
        remade: Remade = NOTHING,
    ):
        self.record, self.remade = record, remade
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
        self.readers = {k: [i for i, reads in enumerate(self.reads) if k in reads] for k in remade.recipes}
        self.made = nanoseconds or [sum(self.sizes[k] for k in born) for born in self.born]
        self.gradient = np.array(record.gradient_bytes, np.int64)
        later = (at if at >= 0 else len(self.gradient) for at in record.first_unpack)
        self.following = [len(self.gradient), *accumulate(later, min)]  # by atom: when backward first asks for one before it
        fixed = {k for i, atom in enumerate(atoms) if not atom.is_repeatable for k in (*self.born[i], *self.reads[i])}
        self.always = {k for k, s in enumerate(record.storages) if s.is_small} | fixed | remade.roots
        self.leaves = self._list_leaves()
        self.borders = [0, *(i + 1 for i in range(count - 1) if self.born[i] or i + 1 in self.leaves), count]
        self.places = {at: i for i, at in enumerate(self.borders)}
        self.work = [self.price(flops, made) for flops, made in zip(record.flops, self.made, strict=True)]
        self.order = [k for born in self.born for k in born]
        self.first = [0, *accumulate(map(len, self.born))]  # by atom: the place of its first storage in this order
        self.bit = {k: 1 << place for place, k in enumerate(self.order)}
        self.read_bits = [sum(self.bit[k] for k in reads) for reads in self.reads]
        self.highest = list(_tabulate_maxima(self.gradient))
        self._inner: dict[tuple[int, int], Span] = {}
        self._roots = sorted(record.storages[k].born for k in remade.roots)
        self._remaking = [0, *accumulate(self._list_remaking())]
        self.options: list[list[SpanOption]] = [[] for _ in self.borders[1:]]

    def _list_leaves(self) -> list[int]:
        """Return the borders of leaves."""
        record = self.record
        inside = [i + 1 for i in range(len(record.atoms) - 1) if record.flops[i] or (len(self.reads[i]) > 1 and self.born[i])]
        return sorted({0, *inside, *record.walls, len(record.atoms)})

    def remakes(self, start: int, end: int) -> bool:
        """Return whether some atoms make, read or pass what is made again across spans."""
        return self._remaking[start] < self._remaking[end]

    def _list_remaking(self) -> list[int]:
        """Return by atom whether something is in use there that is made again across spans."""
        marks = [0] * len(self.record.atoms)
        for k in self.remade.recipes:
            storage = self.record.storages[k]
            last = max(storage.last_use, *storage.saved_by, *self.readers[k], storage.born)
            for i in range(storage.born, min(last + 1, len(marks))):
                marks[i] = 1
        return marks

    def find_highest(self, start: int, end: int) -> int:
        """Return the most bytes of gradients between two positions in the log of backward."""
        level = (end - start).bit_length() - 1
        row = self.highest[level]
        return max(row[start], row[end - (1 << level)])

    def is_alike(self, first: int, last: int) -> bool:
        """Return whether nothing that is made again starts between the borders of two leaves, so that nests there are alike."""
        start, end = self.leaves[max(0, first)], self.leaves[last]
        return bisect_left(self._roots, start) == bisect_left(self._roots, end)

    def find_inner(self, start: int, end: int) -> "Span":
        """Return the span between two atoms as one in a nest."""
        if (start, end) not in self._inner:
            self._inner[start, end] = Span(self, start, end, is_nested=True)
        return self._inner[start, end]

    def price(self, flops: int, made: int) -> int:
        """Return the work of FLOPs and moved bytes together [FLOPs], or the nanoseconds."""
        return self._prices[0] * flops + self._prices[1] * made


class Span:
    """One span, before what it keeps is chosen.

    Args:
        choices: those it belongs to.
        start, end: its atoms.
        is_nested: whether it lies in a nest, which hands it what earlier spans have made.
    """

    def __init__(self, choices: Choices, start: int, end: int, is_nested: bool = False):
        self._choices, self.start, self.end = choices, start, end
        storages = choices.record.storages
        none_remade = is_nested or not choices.remakes(start, end)
        self._recipes: Mapping[int, Sequence[int]] = {} if none_remade else choices.remade.recipes
        self.own = [k for i in range(start, end) for k in choices.born[i]]
        self.forced = frozenset(
            k for k in self.own if (storages[k].last_use >= end and k not in self._recipes) or k in choices.always
        )
        self.saved = [k for k in self.own if storages[k].saved_by and k not in self._recipes]
        self.saved += [k for k in self._recipes if any(start <= i < end for i in storages[k].saved_by)]
        self._own_bits = (1 << choices.first[end]) - (1 << choices.first[start])
        self._saved_bits = sum(choices.bit[k] for k in self.saved if k not in self._recipes)
        self._passing = [k for k in self._recipes if storages[k].born < start <= storages[k].last_use]

    def list_shapes(self, offset: int) -> Iterator[Shape]:
        """Yield what this span may keep, from what it must to all that is saved, and what that needs.

        Args:
            offset: gradients before its backward [bytes].
        """
        choices, forced, bit = self._choices, self.forced, self._choices.bit
        candidates = [k for k in self.saved if k not in forced and k not in self._recipes]
        bits = sum(bit[k] for k in forced)
        most = self._count_work(forced, bits)
        gains = [((most - self._count_work(forced | {k}, bits | bit[k])) / max(1, choices.sizes[k]), k) for k in candidates]
        gains.sort(reverse=True)
        path, kept, least = [forced], forced, most
        for _, k in gains:
            kept, bits = kept | {k}, bits | bit[k]
            if (work := self._count_work(kept, bits)) < least:
                path.append(kept)
                least = work
        if len(path) > _SUBSETS:
            path = [path[round(i * (len(path) - 1) / (_SUBSETS - 1))] for i in range(_SUBSETS)]
        for kept in path:
            yield self._make_shape(kept, offset)

    def _count_work(self, kept: frozenset[int], kept_bits: int) -> int:
        """Return the work of what runs again, given the storages that are kept, and as bits."""
        if self._recipes:
            return self.measure(kept)[0]
        choices, total = self._choices, 0
        order, storages, first = choices.order, choices.record.storages, choices.first
        free = self._own_bits & ~kept_bits
        need = self._saved_bits & free
        while need:
            i = storages[order[need.bit_length() - 1]].born
            total += choices.work[i]
            need = (need | (choices.read_bits[i] & free)) & ((1 << first[i]) - 1)
        return total

    def measure(self, kept: frozenset[int], wanted: Collection[int] | None = None) -> tuple[int, int, int, list[int]]:
        """Return work, FLOPs and bytes of what runs again, and which atoms.

        Args:
            kept: storages.
            wanted: those to be made; None for all that is saved and not kept.
        """
        choices, start = self._choices, self.start
        storages, reads, recipes = choices.record.storages, choices.reads, self._recipes
        need = bytearray(self.end - start)
        before = set[int]()
        for k in self.saved if wanted is None else wanted:
            if k not in kept:
                if storages[k].born >= start:
                    need[storages[k].born - start] = 1
                else:
                    before.update(recipes[k])
        again = []
        for i in range(self.end - 1, start - 1, -1):
            if need[i - start]:
                again.append(i)
                for k in reads[i]:
                    if k not in kept:
                        if storages[k].born >= start:
                            need[storages[k].born - start] = 1
                        elif k in recipes:
                            before.update(recipes[k])
        again = [*sorted(before), *reversed(again)]
        flops, made = (sum(of_atom[i] for i in again) for of_atom in (choices.record.flops, choices.made))
        return choices.price(flops, made), flops, made, again

    def count_bytes(self, storages: Collection[int]) -> int:
        """Return the size of some storages."""
        return sum(self._choices.sizes[k] for k in storages)

    def _make_shape(self, kept: frozenset[int], offset: int) -> Shape:
        choices = self._choices
        _, flops, made, again = self.measure(kept)
        forward = self.peak_of_forward(kept)
        kept -= self._find_small(kept, again)
        backward = self.peak_of_backward(kept, again)
        is_asked = any(at >= 0 for at in choices.record.first_unpack[self.start : self.end])
        first = choices.first[self.start]
        places = tuple(choices.bit[k].bit_length() - 1 - first for k in kept)
        return places, self.count_bytes(kept), forward, backward - offset if is_asked else None, flops, made

    def _find_small(self, kept: frozenset[int], again: Sequence[int]) -> set[int]:
        """Return what is kept for being small alone, and made by atoms that run again: a span drops it at its end."""
        storages, born = self._choices.record.storages, self._choices.born
        inside = {storages[k].born for k in kept if storages[k].maker is None and not storages[k].is_small}
        again = [i for i in again if i not in inside]
        return {k for i in again for k in born[i] if storages[k].is_small and storages[k].maker is None}

    def peak_of_forward(self, kept: Collection[int]) -> int:
        choices = self._choices
        storages, inner = choices.record.storages, choices.record.inner_bytes
        total = highest = sum(choices.sizes[k] for k in self._passing)
        for i in range(self.start, self.end):
            highest = max(highest, total + inner[i])
            for k in choices.born[i]:
                if k in kept or (storages[k].maker is not None and storages[k].last_use > i):
                    total += choices.sizes[k]
            for k in choices.dead[i]:
                if k not in kept and storages[k].born < i and (storages[k].born >= self.start or k in self._recipes):
                    total -= choices.sizes[k]
        return max(highest, total)

    def peak_of_backward(self, kept: Collection[int], again: Sequence[int]) -> int:
        choices = self._choices
        record, size = choices.record, choices.sizes
        storages, gradient = record.storages, choices.gradient
        asked = [record.first_unpack[i] for i in range(self.start, self.end) if record.first_unpack[i] >= 0]
        held = [k for k in self.own if k in kept and storages[k].released >= 0]
        dropped = [k for k in self.saved if k not in kept]
        if not asked:
            return 0
        begin = min(asked)
        if not dropped:
            return self._highest(begin, [(k, -1, storages[k].released) for k in held])
        # What the recovery starts from lives until then, and what no slot holds until the last slot is free.
        times = {k: self._find_times(k) for k in dropped}
        at = find_first(unpacked for unpacked, _ in times.values())
        last = max(released for _, released in times.values())
        starts = {k for i in again for k in choices.reads[i] if k in kept and storages[k].born >= self.start}
        until = at - 1 if at >= 0 else last
        lives = [(k, -1, max(storages[k].released, until if k in starts else -1)) for k in held]
        lives += [(k, -1, last) for k in starts if storages[k].released < 0]
        if at < 0:
            return self._highest(begin, lives)
        lives += [(k, at, released) for k, (_, released) in times.items()]
        alive = sum(size[k] for k, appears, end in lives if appears < 0 and end >= at)
        passing = {k for k in starts if 0 <= storages[k].released < at}
        recovery = int(gradient[max(0, at - 1)]) + alive + self.peak_of_recovery(kept, again, passing=passing)
        return max(recovery, self._highest(begin, lives))

    def _find_times(self, k: int) -> tuple[int, int]:
        """Return when backward first asks this span for a storage, and when it has no more use for it."""
        storage = self._choices.record.storages[k]
        if k not in self._recipes:
            return storage.unpacked, storage.released
        times = [times for i, times in storage.saved_by.items() if self.start <= i < self.end]
        return find_first(unpacked for unpacked, _ in times), max(released for _, released in times)

    def find_gradients(self, kept: Collection[int]) -> int:
        """Return the bytes of gradients at its recovery; -1 if nothing is dropped."""
        at = find_first(self._find_times(k)[0] for k in self.saved if k not in kept)
        return -1 if at < 0 else int(self._choices.gradient[max(0, at - 1)])

    def _highest(self, begin: int, lives: Sequence[tuple[int, int, int]]) -> int:
        """Return the most bytes of gradients and storages from a position in the log on, given when storages appear and end."""
        choices = self._choices
        following = choices.following[self.start]  # until then backward is here, though it may need nothing more
        end, changes = max(begin, following - 1), dict[int, int]()
        for k, appears, ends in lives:
            appears, end = max(appears, begin), max(end, ends)
            if ends >= appears:
                changes[appears] = changes.get(appears, 0) + choices.sizes[k]
                changes[ends + 1] = changes.get(ends + 1, 0) - choices.sizes[k]
        highest, alive, at = 0, changes.pop(begin, 0), begin
        for place in sorted(changes):
            highest = max(highest, alive + choices.find_highest(at, place))
            alive += changes[place]
            at = place
        return highest if at > end else max(highest, alive + choices.find_highest(at, end + 1))

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
        stays = set(self.saved if wanted is None else wanted)
        total = highest = sum(choices.sizes[k] for k in passing)
        for i in again:
            highest = max(highest, total + inner[i] + copied[i])
            for k in choices.born[i]:
                if k not in kept and (k in stays or last.get(k, -1) > i):
                    total += choices.sizes[k]
            for k in choices.reads[i]:
                own = storages[k].born >= self.start or k in self._recipes
                if ((own and k not in kept and k not in stays) or k in passing) and last[k] == i:
                    total -= choices.sizes[k]
        return max(highest, total)


def _tabulate_maxima(values: NDArray[np.int64]) -> Iterator[list[int]]:
    """Yield rows of the maxima of 1, 2, 4, 8 ... consecutive values."""
    length = 1
    while True:
        yield values.tolist()
        if values.size <= length:
            return
        values, length = np.maximum(values[:-length], values[length:]), 2 * length
