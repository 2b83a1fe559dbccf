"""Which tensors of a recorded graph to keep and which spans to recover together: the least work within a budget.

A span is a run of atoms between two borders. Long spans begin and end after products (matrix products, convolutions) and sums;
the atoms between two such places are a leaf. Short spans may begin and end after any atom, which matters where the largest
tensors are. What crosses a border is kept, unless later spans make it again (`remaking.py`). A span may keep some of its other
tensors; the rest is recovered when backward first asks for some of it, by running the atoms again that are needed.
`equal_spans.py` goes through all spans, and `front.py` finds the cheapest sequence of them.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from revzoo.analysis.flops import FLOPS_PER_BYTE
from revzoo.graph.step_record import Record, find_first


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
        self, record: Record, count_flops_only: bool = False, nanoseconds: Sequence[int] | None = None, remade: Remade = NOTHING
    ):
        self.record, self.remade = record, remade
        self._prices = (1, 0 if count_flops_only else FLOPS_PER_BYTE) if nanoseconds is None else (0, 1)
        atoms, count = record.atoms, len(record.atoms)
        of_node = {node: k for k, storage in enumerate(record.storages) for node in storage.nodes}
        self.sizes = [s.bytes for s in record.storages]
        self.array = np.array(self.sizes, np.int64)
        self.births = [s.born for s in record.storages]
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
        self.place = {k: at for at, k in enumerate(self.order)}
        self.times = np.array([(s.unpacked, s.released) for s in record.storages], np.int64).reshape(-1, 2)
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

    def is_alike(self, first: int, last: int) -> bool:
        """Return whether nothing that is made again starts between the borders of two leaves, so that nests there are alike."""
        start, end = self.leaves[max(0, first)], self.leaves[last]
        return not any(start <= self.births[k] < end for k in self.remade.roots)

    def price(self, flops: int, made: int) -> int:
        """Return the work of FLOPs and moved bytes together [FLOPs], or the nanoseconds."""
        return self._prices[0] * flops + self._prices[1] * made

    def count(self, atoms: Collection[int]) -> tuple[int, int, int]:
        """Return work, FLOPs and bytes made (or time) of some atoms."""
        flops, made = sum(self.record.flops[i] for i in atoms), sum(self.made[i] for i in atoms)
        return self.price(flops, made), flops, made


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
        self.recipes: Mapping[int, Sequence[int]] = {} if none_remade else choices.remade.recipes
        self.own = [k for i in range(start, end) for k in choices.born[i]]
        self.forced = frozenset(
            k for k in self.own if (storages[k].last_use >= end and k not in self.recipes) or k in choices.always
        )
        self.saved = [k for k in self.own if storages[k].saved_by and k not in self.recipes]
        self.saved += [k for k in self.recipes if any(start <= i < end for i in storages[k].saved_by)]
        self._names = [*self.own, *(k for k in self.saved if storages[k].born < start)]
        self._column = {k: i for i, k in enumerate(self._names)}
        self.passing = [k for k in self.recipes if storages[k].born < start <= storages[k].last_use]

    def count_bytes(self, storages: Collection[int]) -> int:
        """Return the size of some storages."""
        return sum(self._choices.sizes[k] for k in storages)

    def find_small(self, kept: frozenset[int], again: Sequence[int]) -> set[int]:
        """Return what is kept for being small alone, and made by atoms that run again: a span drops it at its end."""
        storages, born = self._choices.record.storages, self._choices.born
        inside = {storages[k].born for k in kept if storages[k].maker is None and not storages[k].is_small}
        again = [i for i in again if i not in inside]
        return {k for i in again for k in born[i] if storages[k].is_small and storages[k].maker is None}

    def _mark(self, sets: Sequence[Collection[int]]) -> NDArray[np.bool_]:
        """Return for each set and each of the span's storages whether it is in the set."""
        marks = np.zeros((len(sets), len(self._names)), np.bool_)
        for row, each in zip(marks, sets, strict=True):
            row[[self._column[k] for k in each]] = True
        return marks

    def list_forward_peaks(self, keeps: Sequence[Collection[int]]) -> list[int]:
        """Return the peak of forward for each choice of what is kept."""
        choices, start = self._choices, self.start
        storages, size = choices.record.storages, choices.sizes
        total = sum(size[k] for k in self.passing)
        before = [total]  # what is alive before an atom if nothing is kept but what later atoms read
        for i in range(start, self.end):
            for k in choices.born[i]:
                total += size[k] if storages[k].maker is not None and storages[k].last_use > i else 0
            for k in choices.dead[i]:
                total -= size[k] if storages[k].born < i and (storages[k].born >= start or k in self.recipes) else 0
            before.append(total)
        inner = [*choices.record.inner_bytes[start : self.end], 0]
        # What is kept takes memory beyond its last use, too.
        uses = [storages[k].born if storages[k].maker is None else storages[k].last_use for k in self.own]
        since = np.minimum(np.array(uses, np.int64) + 1, self.end + 1) - start
        more = _accumulate(since, self._mark(keeps)[:, : len(self.own)] * choices.array[self.own], len(before) + 1)[:, :-1]
        return (more + np.add(inner, before)).max(axis=1).tolist()

    def list_backward_peaks(self, plans: Sequence[tuple[Collection[int], Sequence[int]]]) -> list[int]:
        """Return the peak of backward for each choice of what is kept and which atoms run again."""
        choices, record, following = self._choices, self._choices.record, self._choices.following[self.start]
        asked = [at for at in record.first_unpack[self.start : self.end] if at >= 0]
        if not asked:
            return [0] * len(plans)
        begin, never = min(asked), len(choices.gradient)
        times = choices.times[self._names]
        for i, k in enumerate(self._names if self.recipes else ()):
            times[i] = self._find_times(k)
        unpacked, released, size = *times.T, choices.array[self._names]
        starts = [{k for i in again for k in choices.reads[i] if k in kept} for kept, again in plans]
        is_kept, is_start = self._mark([kept for kept, _ in plans]), self._mark(starts)
        is_dropped = ~is_kept & self._mark([self.saved])
        # The recovery begins when the first dropped tensor is asked for. What it starts from lives until then, and what no slot
        # holds until the last slot is free.
        at = np.where(is_dropped & (unpacked >= 0), unpacked, never).min(axis=1, initial=never)[:, None]
        last = np.where(is_dropped, released, -1).max(axis=1, initial=-1)[:, None]
        until = np.where((released < 0) | (at == never), last, at - 1)
        ends = np.where(is_start, np.maximum(released, until), released)
        lives = is_kept | (is_dropped & (at < never))
        end = np.maximum(np.where(lives, ends, -1).max(axis=1, initial=-1), max(begin, following - 1))
        places = np.array(sorted({begin, *(released + 1).tolist(), *unpacked.tolist(), *(end + 1).tolist()}))
        places = places[places.searchsorted(begin) :]
        appears = np.where(is_kept, 0, places.searchsorted(at))
        leaves = np.maximum(places.searchsorted(ends + 1), appears)
        weights = np.where(lives, size, 0)
        alive = (_accumulate(appears, weights, places.size) - _accumulate(leaves, weights, places.size))[:, :-1]
        gradients = np.maximum.reduceat(choices.gradient[: places[-1]], places[:-1])
        peaks: list[int] = np.where(places[:-1] <= end[:, None], alive + gradients, 0).max(axis=1).tolist()
        before = np.where(is_kept & (ends >= at), size, 0).sum(axis=1).tolist()  # the recovery
        for i, (kept, again) in enumerate(plans):
            if (first := int(at[i, 0])) < never:
                passing = {k for k in starts[i] if 0 <= record.storages[k].released < first}
                recovery = before[i] + self.peak_of_recovery(kept, again, passing=passing)
                peaks[i] = max(peaks[i], int(choices.gradient[max(0, first - 1)]) + recovery)
        return peaks

    def _find_times(self, k: int) -> tuple[int, int]:
        """Return when backward first asks this span for a storage, and when it has no more use for it."""
        storage = self._choices.record.storages[k]
        if k not in self.recipes:
            return storage.unpacked, storage.released
        times = [times for i, times in storage.saved_by.items() if self.start <= i < self.end]
        return find_first(unpacked for unpacked, _ in times), max((released for _, released in times), default=-1)

    def find_gradients(self, kept: Collection[int]) -> int:
        """Return the bytes of gradients at its recovery; -1 if nothing is dropped."""
        at = find_first(self._find_times(k)[0] for k in self.saved if k not in kept)
        return -1 if at < 0 else int(self._choices.gradient[max(0, at - 1)])

    def peak_of_recovery(
        self, kept: Collection[int], again: Sequence[int], wanted: Collection[int] | None = None, passing: Collection[int] = ()
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
        freed = dict.fromkeys(again, 0)
        for k, i in last.items():
            own = storages[k].born >= self.start or k in self.recipes
            if (own and k not in kept and k not in stays) or k in passing:
                freed[i] += choices.sizes[k]
        total = highest = sum(choices.sizes[k] for k in passing)
        for i in again:
            highest = max(highest, total + inner[i] + copied[i])
            for k in choices.born[i]:
                if k not in kept and (k in stays or last.get(k, -1) > i):
                    total += choices.sizes[k]
            total -= freed[i]
        return max(highest, total)


def _accumulate(places: NDArray[np.int64], sizes: NDArray[np.int64], length: int) -> NDArray[np.int64]:
    """Return by row how much has been added up to each of some places. Sizes of 0 may have places beyond."""
    rows = length * np.arange(len(sizes))[:, None]
    added = np.bincount((rows + places).ravel(), sizes.ravel(), len(sizes) * length)  # exact up to 8 PiB
    return added[: len(sizes) * length].reshape(-1, length).cumsum(axis=1).astype(np.int64)
