"""`revzoo check`: what would stop or spoil training on data of one's own."""

import argparse
import json
import os
from dataclasses import asdict
from pathlib import Path

from revzoo.commands.parser import FEW, JSON_HELP, Parser
from revzoo.errors import InputError
from revzoo.spec.names import find_beside

SUMMARY = "Look for what is wrong with images or texts of your own."


def declare(parser: Parser) -> None:
    """Add the arguments of `revzoo check`."""
    parser.add_argument("data", type=Path, help="a folder of images in classes, a table of texts, or a folder of tables")
    parser.add_argument("--column", default="text", metavar="NAME", help="column of the texts in tables (default: text)")
    parser.add_argument("--label", default="label", metavar="NAME", help="column of their labels (default: label)")
    parser.add_argument("--json", action="store_true", help=JSON_HELP)


def run(arguments: argparse.Namespace) -> int:
    """Check and print; 1 if something would stop or spoil training."""
    if not os.path.exists(arguments.data):
        hint = find_beside(str(arguments.data))
        raise InputError(f"There is no file or folder {arguments.data}.{hint} Name a folder of images, or a table of texts.")
    from revzoo.display.console import print_renderable, print_text, show_status

    with show_status("reading") as report:
        from revzoo.data.check import PARTS, check_data
        from revzoo.display.tables.base import DottedName, fill, make_table

        check = check_data(arguments.data, arguments.column, arguments.label, report)
    is_bad = any(finding.is_serious for finding in check.findings)
    if arguments.json:
        print(json.dumps(asdict(check), ensure_ascii=False))
        return int(is_bad)
    total = {split: sum(counts[split] for counts in check.classes.values()) for split in PARTS}
    shown = [*(check.classes.items() if len(check.classes) <= FEW else ()), ("all", total)]
    table = [(DottedName(name or "without"), *(f"{counts[split]:,}" for split in PARTS)) for name, counts in shown]
    print_renderable(fill(make_table(), ("class", *PARTS), table))
    if check.sizes:
        least, median, most = ("x".join(map(str, size)) for size in check.sizes)
        modes = "".join(f", {count:,} in {mode}" for mode, count in check.modes.items())
        print(f"Sizes: {least} to {most} {'pixels' if check.noun == 'images' else 'characters'}, median {median}{modes}.")
    for finding in check.findings:
        print_text(f"{'Problem' if finding.is_serious else 'Note'}: {finding.text}")
    for note in check.notes:
        print_text(f"Note: {note}.")
    print("" if is_bad else "Nothing here would stop or spoil training.\n", end="")
    return int(is_bad)
