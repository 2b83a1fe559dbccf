"""Completion in a shell: commands, options, files, names of models and recipes, and the settings that overrides name.

argcomplete runs `revzoo` with the typed line in the environment, and reads what fits from a file descriptor.
"""

import argparse
import sys
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from revzoo.commands.parser import Command, Parser

_MODELS = ("name", "model", "pattern", "target")  # arguments that name a model


def complete(commands: Mapping[str, Command]) -> NoReturn:
    """Answer the shell's question, and exit.

    Args:
        commands: all commands by name.
    """
    try:
        import argcomplete
    except ImportError as error:
        sys.exit(f"revzoo: completion needs the package argcomplete ({error}). Install it: pip install argcomplete")
    parser = argparse.ArgumentParser(prog="revzoo")
    choices = parser.add_subparsers(parser_class=Parser)
    for name, command in commands.items():
        command.declare(own := choices.add_parser(name, help=command.SUMMARY))
        for argument in own._actions:
            if argument.dest in (*_MODELS, "recipe") and not argument.option_strings:
                argument.completer = _Names(own, argument.dest)  # type: ignore[attr-defined]
    argcomplete.autocomplete(parser)
    sys.exit("revzoo: the shell has not said what it wants to complete")


class _Names:
    """Lists what may stand for an argument of a command: names, settings with "=" behind them, and files.

    Args:
        parser: of the command.
        argument: its name.
    """

    def __init__(self, parser: Parser, argument: str):
        self._parser, self._argument = parser, argument

    def __call__(self, prefix: str, **details: Any) -> Iterable[str]:
        from argcomplete.completers import FilesCompleter

        from revzoo.spec.names import model_files, recipe_files

        names = recipe_files() if self._argument == "recipe" else model_files()
        settings = () if self._parser.list_settings is None else self._parser.list_settings()
        return [*names, *(f"{setting}=" for setting in settings), *FilesCompleter()(prefix)]
