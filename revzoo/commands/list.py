"""`revzoo list`: the names of the models, and the zoo's table in the documentation."""

import argparse
from pathlib import Path

from revzoo.commands.parser import Parser
from revzoo.errors import UnknownNameError

SUMMARY = "List the models."


def declare(parser: Parser) -> None:
    """Add the arguments of `revzoo list`."""
    parser.add_argument("pattern", nargs="?", default="*", help="shell-style, such as 'rev_vit*'")
    parser.hints["--all"] = " revzoo list without a pattern prints the names of all models."
    parser.add_argument(
        "--docs", type=Path, metavar="DIR", help="measure these models and update zoo.json and zoo.md in DIR instead"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the names that match, or measure these models for the documentation."""
    from revzoo.spec import list_models

    names = list_models(arguments.pattern)
    if not names:
        raise UnknownNameError("model", arguments.pattern, list_models())
    if arguments.docs is None:
        print("\n".join(names))
    else:
        from revzoo.analysis.zoo import update
        from revzoo.planning.card import update as update_cards

        update(arguments.docs, names)
        update_cards(arguments.docs, names)
    return 0
