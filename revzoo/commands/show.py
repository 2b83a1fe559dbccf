"""`revzoo show`: the report of a model as tables, JSON or a picture."""

import argparse
import json
from pathlib import Path

from revzoo.commands.model_options import declare_name, read_name
from revzoo.commands.parser import JSON_HELP, Parser, positive_count, require_png

SUMMARY = "Show a model's parts, and the memory and FLOPs of a training step."


def declare(parser: Parser) -> None:
    """Add the arguments of `revzoo show`."""
    declare_name(parser)
    parser.add_argument(
        "--batch", type=positive_count, metavar="N", help="examples in a batch (default: 32 images, or 8 texts)"
    )
    parser.add_argument(
        "--tiles", type=positive_count, default=1, metavar="N", help="into how many pieces every step is cut (default: 1)"
    )
    parser.add_argument("--json", action="store_true", help=JSON_HELP)
    parser.add_argument(
        "--plot", type=Path, metavar="FILE.png", help="also draw the network, and what each part keeps for backward"
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure a model on the meta device and print its report."""
    name, overrides = read_name(arguments.name)
    if arguments.plot is not None:
        require_png(arguments.plot)
    from revzoo.display.console import print_renderable, show_status

    with show_status("counting memory and FLOPs"):
        from revzoo.analysis.counting import report_model
        from revzoo.model.create import create

        model = create(name, overrides=overrides, tiles=arguments.tiles, device="meta")
        report = report_model(model, arguments.batch)
    if arguments.plot is not None:
        from revzoo.display.figures.model import plot_model

        plot_model(report, arguments.plot)
    if arguments.json:
        print(json.dumps(report.to_dict(), indent=2))
    else:
        from revzoo.display.tables.model import tabulate_model

        print_renderable(tabulate_model(report))
    return 0
