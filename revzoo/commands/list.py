"""`revzoo list`: the names of the models and recipes, and what was measured of them."""

import argparse
import json
import re
from itertools import takewhile
from pathlib import Path

from revzoo.commands.parser import Parser, declare_import
from revzoo.errors import UnknownNameError

SUMMARY = "List the models."


def declare(parser: Parser) -> None:
    """Add the arguments of `revzoo list`."""
    parser.add_argument("pattern", nargs="?", default="*", help="shell-style, such as 'rev_vit*'")
    declare_import(parser)
    parser.add_argument("--recipes", action="store_true", help="list the recipes of revzoo train instead")
    parser.add_argument("--long", action="store_true", help="also parameters, FLOPs, memory and weights, or what a recipe does")


def run(arguments: argparse.Namespace) -> int:
    """Print the names that match; with --long also what was measured for them."""
    from revzoo.spec import list_models

    if arguments.recipes:
        return _list_recipes(arguments)
    names = list_models(arguments.pattern)
    if not names:
        raise UnknownNameError("model", arguments.pattern, list_models())
    if not arguments.long:
        print("\n".join(names))
        return 0
    from revzoo.display.console import print_renderable
    from revzoo.display.tables.zoo import tabulate_zoo
    from revzoo.spec.names import data_root

    print_renderable(tabulate_zoo(names, json.loads((data_root() / "docs" / "zoo.json").read_text(encoding="utf-8"))))
    return 0


def _list_recipes(arguments: argparse.Namespace) -> int:
    """Print the names of the recipes that match, or with --long what the first lines of their files say."""
    from revzoo.spec.names import list_recipes, recipe_files

    names = list_recipes(arguments.pattern)
    if not names:
        raise UnknownNameError("recipe", arguments.pattern, list_recipes())
    if not arguments.long:
        print("\n".join(names))
        return 0
    from revzoo.display.console import print_renderable
    from revzoo.display.tables.zoo import tabulate_recipes

    files = recipe_files()
    print_renderable(tabulate_recipes({name: _read_first_sentence(files[name]) for name in names}))
    return 0


def _read_first_sentence(file: Path) -> str:
    """Return the first sentence of the comment at the top of a file; nothing if there is no comment."""
    lines = takewhile(lambda line: re.match("# *[^ ]", line), file.read_text(encoding="utf-8").splitlines())
    comment = " ".join(line.lstrip("# ") for line in lines)
    return re.split(r"(?<=\.) (?=[A-Z])", comment)[0]
