"""`revzoo export`: the weights of a converted network for the library it came from."""

import argparse
from pathlib import Path

from revzoo.commands.parser import Parser

SUMMARY = "Write a converted network's weights under the original's names."


def declare(parser: Parser) -> None:
    """Add the arguments of `revzoo export`."""
    parser.add_argument("folder", type=Path, help="a folder that revzoo convert wrote")
    parser.add_argument(
        "--weights", type=Path, metavar="FILE", help="fine-tuned weights of the converted network (default: the folder's own)"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.safetensors", help="the file to write")


def run(arguments: argparse.Namespace) -> int:
    """Export the weights and print how many tensors there are."""
    from revzoo.conversion.export import export

    count = export(arguments.folder, arguments.out, arguments.weights)
    print(f"{arguments.out}: {count} tensors under the original's names.")
    return 0
