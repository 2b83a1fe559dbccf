"""`revzoo bench`: the same blocks by revzoo, by PyTorch alone and by other packages."""

import argparse
import json
from pathlib import Path

from revzoo.commands.parser import JSON_HELP, Parser, require_png

SUMMARY = "Compare revzoo with PyTorch alone and with other packages."


def declare(parser: Parser) -> None:
    """Add the arguments of `revzoo bench`."""
    parser.epilog = (
        "Two networks, a chain of transformer blocks and one of convolutions, are run by every method whose package is "
        'installed; pip install "revzoo[bench]" installs all of them but xformers, whose later releases have no reversible '
        "blocks. docs/benchmark.md says what is measured, and how."
    )
    parser.add_argument(
        "--full",
        action="store_true",
        help="also methods and checks that compile, DDP in two processes, more blocks and rounds: an hour or two instead of "
        "minutes",
    )
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="also draw memory, FLOPs and checks")
    parser.add_argument("--json", action="store_true", help=JSON_HELP)


def run(arguments: argparse.Namespace) -> int:
    """Run the comparison and print it."""
    if arguments.plot is not None:
        require_png(arguments.plot)
    from revzoo.display.console import print_renderable, show_status

    with show_status("preparing the comparison") as announce:
        from revzoo.bench.report import FULL, QUICK, compare_methods

        report = compare_methods(FULL if arguments.full else QUICK, announce)
    if arguments.plot is not None:
        with show_status("drawing"):
            from revzoo.display.figures.bench import plot_bench

            plot_bench(report, arguments.plot)
    if arguments.json:
        print(json.dumps(report.to_dict(), indent=2))
    else:
        from revzoo.display.tables.bench import tabulate_bench

        print_renderable(tabulate_bench(report))
    return 0
