"""`revzoo numerics`: what rounding does to rebuilt activations and gradients."""

import argparse
from contextlib import nullcontext

from revzoo.commands.model_options import declare_name, read_name, require_memory
from revzoo.commands.parser import DTYPE_HELP, DTYPES, JSON_HELP, Parser, positive_count

SUMMARY = "Measure the noise in rebuilt activations and what it does to gradients."


def declare(parser: Parser) -> None:
    """Add the arguments of `revzoo numerics`."""
    parser.epilog = "docs/numerics.md says what the figures mean, and what to do about a low ratio of signal to noise."
    declare_name(parser)
    parser.add_argument("--batch", type=positive_count, default=16, metavar="N", help="examples in a batch (default: 16)")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help=DTYPE_HELP)
    parser.add_argument("--autocast", choices=("bfloat16", "float16"), help="number format of autocast (default: none)")
    parser.add_argument("--exact", action="store_true", help="keep the streams on a grid, so that inversion does not round")
    parser.add_argument("--json", action="store_true", help=JSON_HELP)


def run(arguments: argparse.Namespace) -> int:
    """Measure a freshly initialised model, and print the report."""
    name, overrides = read_name(arguments.name)
    from revzoo.display.console import print_result, show_status
    from revzoo.display.tables.numerics import tabulate_numerics

    with show_status("measuring rounding errors"):
        import torch

        from revzoo.analysis.numerics import measure_numerics
        from revzoo.model.create import create

        torch.manual_seed(0)
        model = create(name, overrides=overrides, dtype=getattr(torch, arguments.dtype), exact=arguments.exact)
        require_memory(model, arguments.batch, ["store"], copies=1)
        autocast = arguments.autocast
        with nullcontext() if autocast is None else torch.autocast("cpu", getattr(torch, autocast)):
            report = measure_numerics(model, model.example_input(arguments.batch))
    arithmetic = arguments.dtype + f", autocast {autocast}" * (autocast is not None) + ", exact" * arguments.exact
    title = f"{model.spec.name}, batch of {arguments.batch}, {arithmetic}"
    about = {"model": model.spec.name, "batch": arguments.batch, "arithmetic": arithmetic}
    print_result(about | report.to_dict(), tabulate_numerics(title, report), as_json=arguments.json)
    return 0
