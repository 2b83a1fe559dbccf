"""The model of a command, as it is typed: a name, and overrides of its spec."""

import os
from collections.abc import Sequence
from pathlib import Path

from revzoo.commands.parser import NAME_HELP, Parser, declare_import, split_overrides
from revzoo.errors import InputError
from revzoo.hub import HUB_PREFIX


def declare_name(parser: Parser, name_help: str = NAME_HELP) -> None:
    """Add the name of a model and its overrides; an option that is none is pointed to the override of that name."""
    parser.add_argument("name", nargs="+", help=f"{name_help}, and overrides such as head.outputs=10 or img_size=160")
    declare_import(parser)
    parser.list_settings = _list_settings


def is_any_module(name: str) -> bool:
    """Return whether a name stands for a module that is not the zoo's; a folder may have a colon in its name."""
    names_function = ":" in name and not name.startswith(HUB_PREFIX) and not os.path.exists(name)
    return names_function or (Path(name) / "config.json").is_file()


def read_name(words: Sequence[str]) -> tuple[str, list[str]]:
    """Return the one name among words, and the overrides.

    Raises:
        InputError: there is no name, or more than one.
    """
    names, overrides = split_overrides(list(words))
    if len(names) != 1:
        raise InputError(f"Name one model. Received: {', '.join(names) or 'none'}. Overrides look like head.outputs=10.")
    return names[0], overrides


def _list_settings() -> list[str]:
    from revzoo.spec.parsing import list_paths
    from revzoo.spec.schema import Spec
    from revzoo.spec.synonym import TIMM

    return [*TIMM, *list_paths(Spec), "head.outputs"]
