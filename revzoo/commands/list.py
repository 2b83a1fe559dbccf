"""`revzoo list`: the models and recipes, what each is, and what was measured of them."""

import argparse
import json
import re
import sys
from itertools import takewhile
from pathlib import Path

from revzoo.commands.parser import Parser, declare_import
from revzoo.errors import UnknownNameError

SUMMARY = "List the models."


def declare(parser: Parser) -> None:
    """Add the arguments of `revzoo list`."""
    parser.add_argument("pattern", nargs="?", default="*", help="how a name begins, or shell-style, such as 'rev_*_b'")
    declare_import(parser)
    parser.add_argument("--recipes", action="store_true", help="list the recipes of revzoo train instead")
    parser.add_argument(
        "--long", action="store_true", help="MACs and memory instead of words; a table also where the output is no terminal"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print a table of what matches; bare names for programs, where the output is no terminal and --long was not asked for."""
    from revzoo.spec import list_models, list_recipes
    from revzoo.spec.names import data_root, model_files, recipe_files

    kind, list_names = ("recipe", list_recipes) if arguments.recipes else ("model", list_models)
    names = list_names(arguments.pattern) or list_names(f"{arguments.pattern}*")
    if not names:
        raise UnknownNameError(kind, arguments.pattern, list_names("*"))
    if not (arguments.long or sys.stdout.isatty()):
        print("\n".join(names))
        return 0
    from revzoo.display.console import print_renderable
    from revzoo.display.tables.zoo import tabulate_models, tabulate_recipes, tabulate_zoo

    files = recipe_files() if arguments.recipes else model_files()
    meanings = {name: _read_first_sentence(files[name]) for name in names}
    if arguments.recipes:
        print_renderable(tabulate_recipes(meanings))
        return 0
    rows = json.loads((data_root() / "docs" / "zoo.json").read_text(encoding="utf-8"))
    print_renderable(tabulate_zoo(names, rows) if arguments.long else tabulate_models(meanings, rows))
    return 0


def _read_first_sentence(file: Path) -> str:
    """Return the first sentence of the comment at the top of a file; nothing if there is no comment."""
    lines = takewhile(lambda line: re.match("# *[^ ]", line), file.read_text(encoding="utf-8").splitlines())
    comment = " ".join(line.lstrip("# ") for line in lines)
    return re.split(r"(?<=\.) (?=[A-Z])", comment)[0]
