"""`revzoo convert`: a reversible network from a pretrained ordinary one."""

import argparse
import json
from pathlib import Path
from typing import get_args

from revzoo.bounds import MOST_KEPT_BITS, Sign
from revzoo.commands.parser import Parser, declare_import, positive_count
from revzoo.errors import quote

SUMMARY = "Make a pretrained network reversible."


def declare(parser: Parser) -> None:
    """Add the arguments of `revzoo convert`."""
    parser.epilog = (
        "With momentum and dual_residual the converted network computes nearly the original's function; with additive it has "
        "the same tensors, and computes another function until it is fine-tuned. Every command that takes a model takes the "
        "folder."
    )
    parser.add_argument(
        "source",
        help="timm:NAME, hf:OWNER/NAME, a folder with a Transformers config.json, or a zoo model's name or spec file, if FILE "
        "is its published checkpoint",
    )
    declare_import(parser)
    parser.add_argument("--weights", metavar="FILE", help="safetensors, .pth, .bin, an index, model.ckpt-N (default: the hub)")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write, new or empty")
    parser.add_argument(
        "--coupling",
        choices=("momentum", "dual_residual", "additive"),
        default="momentum",
        help="how the two streams are combined in a step (default: momentum)",
    )
    parser.add_argument(
        "--kept-bits",
        type=int,
        choices=range(MOST_KEPT_BITS + 1),
        default=8,
        metavar="S",
        help="bits kept per element and step, for exact inversion; b, the weight of the older stream, is 2^-S (default: 8)",
    )
    parser.add_argument(
        "--sign",
        choices=get_args(Sign),
        default="fixed",
        help="of b; random: drawn in training, with b = 0 in evaluation, so that --kept-bits 1 is enough (default: fixed)",
    )
    parser.add_argument("--m", type=float, metavar="M", help="momentum's m in floating point instead, without kept bits")
    parser.add_argument(
        "--beta", type=float, metavar="B", help="dual_residual's beta in floating point instead, without kept bits"
    )
    parser.add_argument(
        "--no-strict", action="store_true", help="initialise missing tensors at random and drop extra ones instead of refusing"
    )
    parser.add_argument(
        "--outputs",
        type=positive_count,
        metavar="N",
        help="number of classes to fine-tune for: what the head lacks starts at random (default: the original's own head)",
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON instead")


def run(arguments: argparse.Namespace) -> int:
    """Convert a network and print the report."""
    from revzoo.display.console import print_text, show_status

    with show_status("converting, and comparing both networks"):
        from revzoo.conversion.convert import convert
        from revzoo.spec.schema import ImageInput

        floating = arguments.m is not None or arguments.beta is not None
        report = convert(
            arguments.source,
            arguments.weights,
            coupling=arguments.coupling,
            kept_bits=None if floating else arguments.kept_bits,
            sign=arguments.sign,
            m=arguments.m,
            beta=arguments.beta,
            out=arguments.out,
            strict=not arguments.no_strict,
            num_outputs=arguments.outputs,
        )
    if arguments.json:
        print(json.dumps(report.to_dict(), indent=2))
    else:
        print_text(str(report))
        takes_images = isinstance(report.model.spec.input, ImageInput)
        data = "data.root=IMAGES" if takes_images else "data.name=text_classification data.root=TABLE.csv"
        print(f"{arguments.out}: fine-tune it with revzoo train finetune {quote(f'model={arguments.out}')} {data}")
    return 0
