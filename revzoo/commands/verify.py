"""`revzoo verify`: a model's gradients against those of storing everything."""

import argparse

from revzoo.commands.model_options import declare_name, read_name, require_memory
from revzoo.commands.parser import DTYPE_HELP, DTYPES, Parser, positive_count

SUMMARY = "Compare a model's gradients with those of storing all activations."


def declare(parser: Parser) -> None:
    """Add the arguments of `revzoo verify`."""
    declare_name(parser)
    parser.add_argument("--batch", type=positive_count, default=4, metavar="N", help="examples in a batch (default: 4)")
    parser.add_argument("--device", metavar="D", help="where to run (default: cpu)")
    parser.add_argument("--exact", action="store_true", help="keep the streams on a grid, so that inversion does not round")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help=DTYPE_HELP)


def run(arguments: argparse.Namespace) -> int:
    """Verify a model, new or with the weights of its folder, and print the report; 1 if it is not safe to train."""
    name, overrides = read_name(arguments.name)
    from revzoo.display.console import print_text, show_status

    with show_status("comparing gradients"):
        import torch

        from revzoo.analysis.verify import verify
        from revzoo.model.create import create

        torch.manual_seed(0)
        model = create(
            name, overrides=overrides, device=arguments.device, dtype=getattr(torch, arguments.dtype), exact=arguments.exact
        )
        require_memory(model, arguments.batch, ["store"], copies=1)
        report = verify(model, model.example_input(arguments.batch))
    print_text(str(report))
    return 0 if report.ok else 1
