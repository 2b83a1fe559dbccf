"""Names that a spec may use, and the signatures behind them.

A part is a class (or function) whose first positional parameter, if any, is the place it is built for and whose
keyword-only parameters are what a spec may set. Nothing else can be reached from a spec.
"""

import inspect
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from revzoo.errors import UnknownNameError

Entry = TypeVar("Entry", bound=Callable[..., Any])


class Registry:
    """A table from name to callable that refuses duplicates."""

    def __init__(self, kind: str):
        self.kind = kind
        self._entries: dict[str, Callable[..., Any]] = {}

    def register(self, name: str) -> Callable[[Entry], Entry]:
        """Return a decorator that files its target under `name`."""

        def file(entry: Entry) -> Entry:
            if name in self._entries:
                raise ValueError(f"{self.kind} {name!r} is registered twice: {self._entries[name]} and {entry}")
            self._entries[name] = entry
            return entry

        return file

    def __getitem__(self, name: str) -> Callable[..., Any]:
        if name not in self._entries:
            raise UnknownNameError(self.kind, name, self._entries)
        return self._entries[name]

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._entries))

    def arguments(self, name: str) -> dict[str, inspect.Parameter]:
        """Return the keyword-only parameters of an entry: what a spec may set, annotations evaluated."""
        signature = inspect.signature(self[name], eval_str=True)
        return {key: p for key, p in signature.parameters.items() if p.kind is inspect.Parameter.KEYWORD_ONLY}


couplings = Registry("coupling")
stems = Registry("stem")
splits = Registry("split")
branches = Registry("branch")
transitions = Registry("transition")
fuses = Registry("fuse")
heads = Registry("head")
inits = Registry("init")
