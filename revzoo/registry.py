"""The part names that a spec may use, each with its class or function.

A registered class or function takes the context it is built in as its first positional parameter (couplings and inits
take none), and what a spec may set as keyword-only parameters. A spec can reach nothing else.
"""

import inspect
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any, TypeVar

from revzoo.errors import InputError, UnknownNameError

Target = TypeVar("Target", bound=Callable[..., Any])


class Registry:
    """A table from names to classes or functions; a name can be registered once.

    The first lookup imports the module that registers revzoo's own entries. So a spec is checked against all parts, whatever
    was imported before, and a program that looks nothing up never imports torch.

    Args:
        kind: what the names stand for, such as "stem"; used in messages.
        home: name of the module whose import registers revzoo's own entries.
    """

    def __init__(self, kind: str, home: str):
        self.kind = kind
        self._home = home
        self._entries: dict[str, Callable[..., Any]] = {}

    def register(self, name: str) -> Callable[[Target], Target]:
        """Return a decorator that adds a class or function under `name`.

        Raises:
            TypeError: `name` is no string.
            ValueError: it is registered already.
        """
        if not isinstance(name, str):
            raise TypeError(f'A {self.kind} is registered with its name: .register("NAME"). Received: {name!r}.')

        def add(target: Target) -> Target:
            if name in self._entries:
                raise ValueError(f"{self.kind} {name!r} is registered twice: {self._entries[name]} and {target}")
            self._entries[name] = target
            return target

        return add

    def __getitem__(self, name: str) -> Callable[..., Any]:
        entries = self._load()
        if name not in entries:
            raise UnknownNameError(self.kind, name, entries)
        return entries[name]

    def __contains__(self, name: object) -> bool:
        return name in self._load()

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._load()))

    def arguments(self, name: str) -> dict[str, inspect.Parameter]:
        """Return the keyword-only parameters of an entry, which are what a spec may set, with evaluated annotations.

        Raises:
            InputError: an annotation names what its module does not have, such as what only type checkers import.
        """
        try:
            parameters = inspect.signature(self[name], eval_str=True).parameters
        except NameError as error:  # the user's own text
            raise InputError(
                f"The annotations of the {self.kind} {name!r} cannot be read ({error}). Import the names in them outside of "
                "`if TYPE_CHECKING`."
            ) from error
        return {key: p for key, p in parameters.items() if p.kind is inspect.Parameter.KEYWORD_ONLY}

    def _load(self) -> dict[str, Callable[..., Any]]:
        """Return all entries, those of the home module included."""
        import_module(self._home)
        return self._entries


couplings = Registry("coupling", "revzoo.runtime.coupling")
stems = Registry("stem", "revzoo.parts")
splits = Registry("split", "revzoo.parts")
branches = Registry("branch", "revzoo.parts")
transitions = Registry("transition", "revzoo.parts")
fuses = Registry("fuse", "revzoo.parts")
heads = Registry("head", "revzoo.parts")
inits = Registry("init", "revzoo.parts")
