"""`revzoo predict`: the most probable classes of images and texts."""

import argparse
import csv
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from revzoo.commands.parser import Parser, declare_import, positive_count
from revzoo.data.options import IMAGES, TEXT_FILES
from revzoo.errors import InputError, quote

if TYPE_CHECKING:
    from revzoo.data.base import BrokenExampleError
    from revzoo.training.prediction import Prediction

_OF_EXAMPLES = (*IMAGES, *TEXT_FILES)  # endings of files that are no models
SUMMARY = "Name the most probable classes of images or texts."


def declare(parser: Parser) -> None:
    """Add the arguments of `revzoo predict`."""
    parser.add_argument(
        "model", help="the folder of a run or of a saved model, hf-hub:OWNER/NAME, or a model whose weights ship"
    )
    parser.add_argument(
        "files",
        nargs="*",
        type=Path,
        help="images and folders of images; or tables of texts and text files, a text in each line; - is the standard input",
    )
    parser.add_argument("--text", action="append", default=[], metavar="TEXT", help="a text itself; may be repeated")
    declare_import(parser)
    parser.add_argument("--top", type=positive_count, default=5, metavar="N", help="classes to print for each (default: 5)")
    parser.add_argument("--batch", type=positive_count, default=32, metavar="N", help="computed together (default: 32)")
    parser.add_argument("--device", metavar="D", help="where to run (default: cuda if available, else cpu)")
    parser.add_argument("--column", metavar="NAME", help="column of the texts in tables (default: text)")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--csv", action="store_true", help="print a table of comma-separated values, a line for each class")
    form.add_argument("--json", action="store_true", help="print JSON, a line for each image or text")


def run(arguments: argparse.Namespace) -> int:
    """Predict and print; images that cannot be read are named at the end."""
    if Path(arguments.model).suffix.lower() in _OF_EXAMPLES and Path(arguments.model).is_file():
        raise InputError(
            f"The model comes first, and then the files. Received: {arguments.model}. Type revzoo predict runs/images "
            f"{quote(arguments.model)}, for example."
        )
    if not (arguments.files or arguments.text):
        raise InputError(
            f"Name images, or files of texts, after the model; or type revzoo predict {quote(arguments.model)} --text TEXT."
        )
    from revzoo.display.console import show_status

    with show_status("loading the model"):
        import torch

        from revzoo.spec.schema import ImageInput
        from revzoo.training.prediction import describe_misfit, list_inputs, load_classifier, predict

        device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
        model = load_classifier(arguments.model, device)
    inputs = list_inputs(model, arguments.files, arguments.column, arguments.text)
    if isinstance(model.spec.input, ImageInput):
        misfits = ((name, describe_misfit(model.spec.input, file)) for name, file in inputs)
        if first := next((f"{name} has {misfit}" for name, misfit in misfits if misfit), None):
            print(f"Note: {first}: its answer means little unless it was trained on such images.", file=sys.stderr)
    broken: list[BrokenExampleError] = []
    predictions = predict(model, inputs, top=arguments.top, batch_size=arguments.batch, on_broken=broken.append)
    try:
        _print(predictions, arguments)
    finally:
        for error in broken:
            print(f"revzoo: {error}", file=sys.stderr)
    return broken[0].exit_status if broken else 0


def _print(predictions: "Iterable[Prediction]", arguments: argparse.Namespace) -> None:
    from revzoo.display.console import print_renderable

    if arguments.json:
        for prediction in predictions:
            print(json.dumps(prediction.to_dict(), ensure_ascii=False))
    elif arguments.csv:
        _write_csv(predictions)
    else:
        from revzoo.display.tables.prediction import tabulate_predictions

        if rows := [each.to_dict() for each in predictions]:
            print_renderable(tabulate_predictions(rows))


def _write_csv(predictions: "Iterable[Prediction]") -> None:
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(["input", "rank", "class", "probability"])
    for each in predictions:
        for rank, (name, probability) in enumerate(zip(each.classes, each.probabilities, strict=True), 1):
            writer.writerow([each.input, rank, name, f"{probability:.6g}"])
