"""Saying how far a search is, for a status line."""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

Report = Callable[[str], object]
_T = TypeVar("_T")
_EVERY = 8


def keep_silent(_: str) -> None:
    """Report nothing."""


def walk(items: Sequence[_T], what: str, report: Report) -> Iterator[_T]:
    """Yield items, and report how many were taken."""
    for i, item in enumerate(items):
        if i % _EVERY == 0:
            report(f"{what}, {i} of {len(items)}")
        yield item
