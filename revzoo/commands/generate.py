"""`revzoo generate`: a language model continues a text."""

import argparse
from pathlib import Path

from revzoo.commands.parser import Parser, declare_import, positive_count
from revzoo.hub import HUB_PREFIX
from revzoo.spec.loading import find_spec_file

SUMMARY = "Continue a text with a language model."


def declare(parser: Parser) -> None:
    """Add the arguments of `revzoo generate`."""
    parser.epilog = "It ends where prompt and tokens together are as long as the model reads."
    parser.add_argument(
        "model", help="the folder of a run or of a saved model, hf-hub:OWNER/NAME, or a model whose weights ship"
    )
    parser.add_argument("prompt", help="the text to continue; of a long one the end is read")
    declare_import(parser)
    parser.add_argument("--tokens", type=positive_count, default=200, metavar="N", help="most tokens to add (default: 200)")
    parser.add_argument(
        "--temperature", type=float, default=0.8, metavar="T", help="above 1 is wilder; 0: the likeliest token (default: 0.8)"
    )
    parser.add_argument("--top-k", type=positive_count, metavar="K", help="draw among the K likeliest tokens (default: all)")
    parser.add_argument("--seed", type=int, metavar="N", help="of the draws (default: another one each time)")
    parser.add_argument("--device", metavar="D", help="where to run (default: cuda if available, else cpu)")


def run(arguments: argparse.Namespace) -> int:
    """Print the prompt and what the model writes after it."""
    if not arguments.model.startswith(HUB_PREFIX) and Path(arguments.model).suffix != ".safetensors":
        find_spec_file(arguments.model)  # wrong names are refused before torch is imported
    from revzoo.display.console import show_status

    with show_status("writing"):
        import torch

        from revzoo.data.generate import generate
        from revzoo.model.trained import create_trained

        model = create_trained(arguments.model, arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        options = {name: getattr(arguments, name) for name in ("tokens", "temperature", "top_k", "seed")}
        written = generate(model, arguments.prompt, **options)
    print(f"{arguments.prompt}{written}")
    return 0
