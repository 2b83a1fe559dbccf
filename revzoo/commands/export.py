"""`revzoo export`: a trained model as ONNX, or a converted network's weights for the library it came from."""

import argparse
from pathlib import Path

from revzoo.commands.parser import Parser, declare_import
from revzoo.errors import InputError

SUMMARY = "Write a trained model as ONNX, or a converted network under the original's names."


def declare(parser: Parser) -> None:
    """Add the arguments of `revzoo export`."""
    parser.add_argument(
        "model", help="the folder of a run or of a saved model, or a model whose weights ship; for --out one that convert wrote"
    )
    declare_import(parser)
    parser.add_argument("--weights", type=Path, metavar="FILE", help="other weights of the model (default: its own)")
    parser.add_argument("--onnx", type=Path, metavar="FILE.onnx", help="write the network for ONNX, checked with onnxruntime")
    parser.add_argument(
        "--out", type=Path, metavar="FILE.safetensors", help="write a converted network's weights under the original's names"
    )


def run(arguments: argparse.Namespace) -> int:
    """Export, and print what was written."""
    if arguments.onnx is None and arguments.out is None:
        raise InputError(
            "Name the file to write: --onnx network.onnx, or --out back.safetensors for a network that revzoo convert wrote."
        )
    from revzoo.display.console import show_status

    if arguments.out is not None:
        with show_status("exporting"):
            from revzoo.conversion.export import export

            count = export(arguments.model, arguments.out, arguments.weights)
        print(f"{arguments.out}: {count} tensors under the original's names.")
    if arguments.onnx is not None:
        with show_status("exporting, and comparing with onnxruntime"):
            from revzoo.conversion.onnx_file import export_onnx
            from revzoo.model.trained import create_trained

            difference = export_onnx(create_trained(arguments.model, checkpoint=arguments.weights), arguments.onnx)
        print(f"{arguments.onnx}: onnxruntime's outputs differ from the model's by {difference:.1e} of the largest.")
    return 0
