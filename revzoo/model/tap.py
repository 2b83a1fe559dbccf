"""Taps: places in a network where the streams are handed out, joined, while it runs on."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from torch import Tensor

from revzoo.runtime.layout import LayoutEntry


class Tap:
    """Called with the streams, or with the one tensor of a network without coupling; keeps what `join` makes of them.

    A chain of steps ends at a tap, so for backward one pair of streams is kept for each, as at a transition.

    Args:
        join: makes one tensor of the streams.
    """

    def __init__(self, join: Callable[..., Tensor]):
        self._join = join
        self.feature: Tensor | None = None

    def __call__(self, *streams: Tensor) -> tuple[Tensor, ...]:
        self.feature = self._join(*streams)
        return streams


def insert_taps(layout: Sequence[LayoutEntry], taps: Mapping[str, Tap], stop_early: bool = False) -> list[LayoutEntry]:
    """Return the layout with a node for each tap, after the step or layer whose name it has.

    Args:
        stop_early: whether the layout ends with the last tap.
    """
    entries: list[LayoutEntry] = []  # as `torch.compile` can read it
    last = 0
    for entry in layout:
        entries.append(entry)
        if entry.name in taps:
            entries.append(LayoutEntry(f"{entry.name} (tap)", cast(Any, taps[entry.name]), "node", entry.stage))
            last = len(entries)
    return entries[:last] if stop_early else entries
