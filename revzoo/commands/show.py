"""`revzoo show`: the report of a model as tables, JSON or a picture."""

import argparse
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
    from revzoo.display.console import print_result, show_status
    from revzoo.display.tables.model import tabulate_model

    with show_status("counting memory and FLOPs"):
        from revzoo.analysis.counting import report_model
        from revzoo.model.create import create

        model = create(name, overrides=overrides, tiles=arguments.tiles, device="meta")
        report = report_model(model, arguments.batch)
    if arguments.plot is not None:
        from revzoo.display.figures.model import plot_model

        plot_model(report, arguments.plot)
    print_result(report.to_dict(), tabulate_model(report), as_json=arguments.json)
    return 0
