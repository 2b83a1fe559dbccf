"""All spans of a graph that are considered. Networks repeat their blocks, so many spans are equal; each is measured once.

A span is known by its atoms, one by one: what they compute, allocate and read, and when backward asks for it and frees it, as
seen from the atom. Only the gradients before its backward differ between equal spans.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator, Sequence

from revzoo.graph.progress import Report, keep_silent, walk
from revzoo.graph.span_choices import Choices, Shape, Span, SpanOption

_LONGEST = 24  # leaves in a span
_LONGEST_INSIDE = 6  # leaves that a span overlaps, where it begins or ends inside one
_SUBSETS = 8  # of what a span may keep
_Key = tuple[tuple[int, ...], bytes, int, int]


def add_spans(sets: Sequence[Choices], report: Report = keep_silent) -> None:
    """Add spans to the options of a graph, for one or more sets of what is made again across spans."""
    numbers, known = dict[object, int](), dict[_Key, list[Shape]]()
    for choices in sets:
        spans = _Spans(choices, _classify(choices, numbers), known)
        for border in walk(range(len(choices.options)), "planning: spans", report):
            choices.options[border].extend(spans.list_options(border))


def _classify(choices: Choices, numbers: dict[object, int]) -> list[int]:
    """Return a number for every atom; spans of atoms with the same numbers are equal but for the gradients around them."""
    record, leaves, first = choices.record, choices.leaves, choices.first
    far = max(end - start for start, end in zip(leaves, [*leaves[_LONGEST + 1 :], leaves[-1]], strict=False))
    place = choices.place
    classes, last_asked = [], 0
    for i, asked in enumerate(record.first_unpack):
        since = asked - last_asked if asked >= 0 else None
        last_asked = asked if asked >= 0 else last_asked
        storages = []
        for k in choices.born[i]:
            each = record.storages[k]
            times = [at - last_asked if at >= 0 else None for at in (each.unpacked, each.released)]
            last_use = min(each.last_use - i, far)  # beyond the end of any span
            is_kept = each.is_small, k in choices.always
            storages.append((each.bytes, each.maker is None, last_use, bool(each.saved_by), *times, *is_kept))
        makers = [(record.storages[k].born, place[k]) for k in choices.reads[i]]
        reads = tuple((i - born, at - first[born]) for born, at in makers if i - born < far)
        own = record.flops[i], choices.made[i], record.inner_bytes[i], record.copied_bytes[i], since
        classes.append(numbers.setdefault((own, tuple(storages), reads), len(numbers)))
    return classes


class _Spans:
    """The spans of a graph.

    Args:
        choices: of the graph.
        classes: numbers of the atoms, equal where they are.
        known: what spans may keep that were measured.
    """

    def __init__(self, choices: Choices, classes: Sequence[int], known: dict[_Key, list[Shape]]):
        self._choices, self._classes, self._known = choices, classes, known

    def list_options(self, border: int) -> Iterator[SpanOption]:
        """Yield the spans from a border on, each with what it may keep."""
        choices = self._choices
        start, leaves = choices.borders[border], choices.leaves
        first = bisect_right(leaves, start)
        for end in choices.borders[border + 1 :]:
            overlapped = bisect_left(leaves, end) - first + 1
            if overlapped > _LONGEST:
                break
            if overlapped <= _LONGEST_INSIDE or (leaves[first - 1] == start and leaves[first - 1 + overlapped] == end):
                yield from self._measure(start, end)
            if end in choices.record.walls:
                break

    def _measure(self, start: int, end: int) -> Iterator[SpanOption]:
        choices = self._choices
        begin, until = self._find_backward(start, end)
        offset = int(choices.gradient[max(0, begin - 1)])
        shapes = key = None
        if not choices.remakes(start, end):
            gradient = choices.gradient[max(0, begin - 1) : until + 1] - offset
            following = max(-1, choices.following[start] - begin)
            key = tuple(self._classes[start:end]), gradient.tobytes(), following, min(begin, 1)
            shapes = self._known.get(key)
        if shapes is None:
            shapes = _list_shapes(choices, Span(choices, start, end), offset)
            if key is not None:
                self._known[key] = shapes
        first, order = choices.first[start], choices.order
        for places, size, forward, backward, flops, made in shapes:
            need = forward if backward is None else max(forward, offset + backward)
            yield SpanOption(start, end, tuple([order[first + at] for at in places]), size, need, flops, made)

    def _find_backward(self, start: int, end: int) -> tuple[int, int]:
        """Return where backward first asks for what these atoms save, and where it has no more use for what they make."""
        choices = self._choices
        storages = choices.record.storages
        asked = [at for at in choices.record.first_unpack[start:end] if at >= 0]
        begin = min(asked, default=0)
        released = (storages[k].released for k in choices.order[choices.first[start] : choices.first[end]])
        return begin, max(begin, choices.following[start] - 1, max(released, default=-1))


def _list_shapes(choices: Choices, span: Span, offset: int) -> list[Shape]:
    """Return what a span may keep, from what it must to all that is saved, and what that needs.

    Args:
        choices: of the graph.
        span: one of its spans.
        offset: gradients before its backward [bytes].
    """
    runs, kept = Reruns(choices, span, span.forced), span.forced
    candidates = [k for k in span.saved if k not in kept and k not in span.recipes]
    gains = sorted(((runs.count_gain(k) / max(1, choices.sizes[k]), k) for k in candidates), reverse=True)
    points = [(kept, 0)]
    for _, k in gains:
        kept |= {k}
        if runs.keep(k):
            points.append((kept, len(runs.stopped)))
    if len(points) > _SUBSETS:
        points = [points[round(i * (len(points) - 1) / (_SUBSETS - 1))] for i in range(_SUBSETS)]
    path = [(kept, runs.list_atoms(count)) for kept, count in points]
    forward = span.list_forward_peaks([kept for kept, _ in path])
    path = [(kept - span.find_small(kept, again), again) for kept, again in path]
    is_asked = any(at >= 0 for at in choices.record.first_unpack[span.start : span.end])
    backward = [peak - offset if is_asked else None for peak in span.list_backward_peaks(path)]
    shapes = list[Shape]()
    for (kept, again), ahead, back in zip(path, forward, backward, strict=True):
        places = tuple(choices.place[k] - choices.first[span.start] for k in kept)
        shapes.append((places, span.count_bytes(kept), ahead, back, *choices.count(again)[1:]))
    return shapes


class Reruns:
    """The atoms that run again for a span, while one more storage after the other is kept.

    Args:
        choices: of the graph.
        span: in it.
        kept: storages that are not made.
        wanted: those to be made; None for all that is saved and not kept.
    """

    def __init__(self, choices: Choices, span: Span, kept: frozenset[int], wanted: Collection[int] | None = None):
        self._choices = choices
        self._needs = dict.fromkeys([*(k for k in span.own if k not in kept), *span.recipes], 0)  # of what is not kept
        self._atoms: dict[int, int] = {}  # that run at first, with how many of their storages are needed now
        self.stopped: list[int] = []  # those that run no longer because of what was kept
        waiting = [k for k in (span.saved if wanted is None else wanted) if k in self._needs]
        while waiting:
            k = waiting.pop()
            self._needs[k] += 1
            if self._needs[k] == 1:
                i = choices.births[k]
                self._atoms[i] = self._atoms.get(i, 0) + 1
                if self._atoms[i] == 1:
                    waiting += [each for each in choices.reads[i] if each in self._needs]

    def list_atoms(self, num_stopped: int = 0) -> list[int]:
        """Return the atoms that ran when so many had stopped."""
        return sorted(self._atoms.keys() - self.stopped[:num_stopped])

    def keep(self, k: int) -> int:
        """Keep a storage; return the work of what runs no longer."""
        if self._needs.pop(k):  # for what reads it or saves it
            stopped, _ = self._release(k)
            self.stopped += stopped
            return sum(self._choices.work[i] for i in stopped)
        return 0

    def count_gain(self, k: int) -> int:
        """Return what keeping a saved storage would save."""
        needs = self._needs.pop(k)
        stopped, released = self._release(k)
        for each in released:
            self._atoms[self._choices.births[each]] += not self._needs[each]
            self._needs[each] += 1
        self._atoms[self._choices.births[k]] += 1
        self._needs[k] = needs
        return sum(self._choices.work[i] for i in stopped)

    def _release(self, k: int) -> tuple[list[int], list[int]]:
        """Stop making a storage; return the atoms that need not run for it, and what each of them has read."""
        births, reads, needs, atoms = self._choices.births, self._choices.reads, self._needs, self._atoms
        stopped, released, waiting = list[int](), list[int](), [k]
        while waiting:
            i = births[waiting.pop()]
            atoms[i] -= 1
            if not atoms[i]:
                stopped.append(i)
                for each in reads[i]:
                    if each in needs:
                        released.append(each)
                        needs[each] -= 1
                        if not needs[each]:
                            waiting.append(each)
        return stopped, released
