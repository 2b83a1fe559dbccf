"""`revzoo verify`: a model's gradients against those of storing everything."""

import argparse

from revzoo.commands.parser import DTYPE_HELP, DTYPES, NAME_HELP, Parser, positive_count

SUMMARY = "Compare a model's gradients with those of storing all activations."


def declare(parser: Parser) -> None:
    """Add the arguments of `revzoo verify`."""
    parser.add_argument("name", help=NAME_HELP)
    parser.add_argument("--batch", type=positive_count, default=4, metavar="N", help="examples in a batch (default: 4)")
    parser.add_argument("--exact", action="store_true", help="keep the streams on a grid, so that inversion does not round")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help=DTYPE_HELP)


def run(arguments: argparse.Namespace) -> int:
    """Verify a model, new or with the weights of its folder, and print the report; 1 if it is not safe to train."""
    import torch

    from revzoo.analysis.verify import verify
    from revzoo.model.create import create

    torch.manual_seed(0)
    model = create(arguments.name, dtype=getattr(torch, arguments.dtype), exact=arguments.exact)
    report = verify(model, model.example_input(arguments.batch))
    print(report)
    return 0 if report.ok else 1
