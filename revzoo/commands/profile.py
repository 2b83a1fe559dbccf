"""`revzoo profile`: what every step and node of a model keeps and costs in every mode."""

import argparse
from dataclasses import asdict

from revzoo.commands.model_options import BATCH_HELP, create_batch, create_model, create_optimizer, declare_model
from revzoo.commands.parser import JSON_HELP, Parser, positive_count

SUMMARY = "Measure the memory and time of every step and node of a model in every mode."


def declare(parser: Parser) -> None:
    """Add the arguments of `revzoo profile`."""
    declare_model(parser, positive_count, "N", BATCH_HELP)
    parser.add_argument("--json", action="store_true", help=JSON_HELP)


def run(arguments: argparse.Namespace) -> int:
    """Profile a model and print the result."""
    from revzoo.display.console import print_result, show_status

    with show_status("counting and timing every unit"):
        model = create_model(arguments)
        from revzoo.display.tables.profile import tabulate_profile
        from revzoo.planning.profiling.profile import profile

        batch = create_batch(model, arguments.batch)
        result = profile(model, batch, create_optimizer(arguments.optimizer, model))
    print_result(asdict(result), tabulate_profile(result), as_json=arguments.json)
    return 0
