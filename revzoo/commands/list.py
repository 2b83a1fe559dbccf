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
    parser.add_argument("--long", action="store_true", help="also parameters, MACs, memory and weights, or what a recipe does")


def run(arguments: argparse.Namespace) -> int:
    """Print the names that match; with --long also what was measured for models, or what the files of recipes say."""
    from revzoo.spec import list_models, list_recipes

    kind, list_names = ("recipe", list_recipes) if arguments.recipes else ("model", list_models)
    names = list_names(arguments.pattern)
    if not names:
        raise UnknownNameError(kind, arguments.pattern, list_names("*"))
    if not arguments.long:
        print("\n".join(names))
        return 0
    from revzoo.display.console import print_renderable
    from revzoo.display.tables.zoo import tabulate_recipes, tabulate_zoo
    from revzoo.spec.names import data_root, recipe_files

    if arguments.recipes:
        files = recipe_files()
        print_renderable(tabulate_recipes({name: _read_first_sentence(files[name]) for name in names}))
    else:
        print_renderable(tabulate_zoo(names, json.loads((data_root() / "docs" / "zoo.json").read_text(encoding="utf-8"))))
    return 0


def _read_first_sentence(file: Path) -> str:
    """Return the first sentence of the comment at the top of a file; nothing if there is no comment."""
    lines = takewhile(lambda line: re.match("# *[^ ]", line), file.read_text(encoding="utf-8").splitlines())
    comment = " ".join(line.lstrip("# ") for line in lines)
    return re.split(r"(?<=\.) (?=[A-Z])", comment)[0]
