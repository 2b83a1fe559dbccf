"""`revzoo eval`: the metrics of a trained run, or of weights that ship."""

import argparse
import csv
import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from revzoo.commands.parser import FEW, JSON_HELP, Parser, declare_import, require_png, require_writable, split_overrides
from revzoo.errors import InputError
from revzoo.spec.names import model_files, require_checkpoint

if TYPE_CHECKING:
    from revzoo.training.class_report import ClassReport
    from revzoo.training.evaluation import Scores

SUMMARY = "Evaluate a trained model, or weights that ship."


def declare(parser: Parser) -> None:
    """Add the arguments of `revzoo eval`."""
    parser.epilog = "A GPU is used where there is one: CUDA_VISIBLE_DEVICES chooses it, ACCELERATE_USE_CPU=true the CPU."
    parser.add_argument(
        "target",
        nargs="*",
        help="the folder of a run, a checkpoint in it, or a model whose weights ship; and overrides such as data.root=DIR",
    )
    declare_import(parser)
    parser.add_argument("--per-class", action="store_true", help=f"print a row for each class, even of more than {FEW}")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="also draw the confusion matrix")
    parser.add_argument(
        "--errors", type=Path, metavar="FILE.csv", help="also list the examples guessed wrongly, the surest guess first"
    )
    parser.add_argument("--json", action="store_true", help=JSON_HELP)


def run(arguments: argparse.Namespace) -> int:
    """Evaluate and print the metrics; 1 if the loss is not finite or shipped weights do not reach the metric of their index."""
    targets, overrides = split_overrides(arguments.target)
    if len(targets) != 1:
        raise InputError("Name one thing to evaluate: the folder of a run, a checkpoint in it, or a model whose weights ship.")
    if targets[0] not in model_files():
        require_checkpoint(targets[0])
    if arguments.plot is not None:
        require_png(arguments.plot)
    if arguments.errors is not None:
        require_writable(arguments.errors)
    from revzoo.display.console import print_text, show_status

    with show_status("evaluating"):
        from revzoo.checkpoint.index import read_index
        from revzoo.metric import CHOSEN
        from revzoo.training.evaluate_checkpoint import evaluate_checkpoint, evaluate_pretrained
        from revzoo.training.terminal import read_rank

        by_class = bool(arguments.per_class or arguments.plot or arguments.errors)
        if targets[0] in read_index():  # as for every command, a name goes before a folder that has it
            scores, entry = evaluate_pretrained(targets[0], overrides, by_class=by_class)
        else:
            scores, entry = evaluate_checkpoint(Path(targets[0]), overrides, by_class=by_class), None
    expected = None if entry is None else entry.metric[CHOSEN.key]
    is_finite, same = math.isfinite(scores.loss), True
    if expected is not None:
        same = abs(scores.metrics[CHOSEN.key] - expected) < 0.005  # the index has two decimals
    status = 0 if is_finite and same else 1
    if read_rank() > 0:  # every process knows all of the scores
        return status
    if arguments.json:
        print(json.dumps(_describe(targets[0], scores, expected), ensure_ascii=False, allow_nan=False))
    else:
        for note in scores.notes:
            print_text(f"Note: {note}.")
        print_text(f"{targets[0]}: {scores}")
        if expected is not None:
            print(f"The index says {CHOSEN.label} {CHOSEN.format(expected)}: {'the same' if same else 'NOT the same'}.")
    if scores.classes is not None:
        _report_classes(arguments, scores.classes)
    if not is_finite:
        print("revzoo: the loss is not finite: the model returns infinities or NaN.", file=sys.stderr)
    return status


def _describe(target: str, scores: "Scores", expected: float | None) -> dict[str, Any]:
    """Return all of an evaluation as plain data."""
    loss = scores.loss if math.isfinite(scores.loss) else None  # JSON has no NaN
    facts: dict[str, Any] = {
        "model": target,
        **scores.metrics,
        "loss": loss,
        scores.label_noun: scores.count,
        "notes": list(scores.notes),
    }
    if expected is not None:
        facts["expected"] = expected
    if (classes := scores.classes) is not None:
        facts |= {"classes": classes.list_classes(), "mean": classes.average()}
        facts |= {"confusion": classes.count_guesses(), "errors": classes.list_errors()}
    return facts


def _report_classes(arguments: argparse.Namespace, classes: "ClassReport") -> None:
    """Print the table of the classes, and write what is asked for."""
    written = []
    if arguments.plot is not None:
        from revzoo.display.figures.confusion import plot_confusion

        plot_confusion(classes.count_guesses(), classes.class_names, arguments.plot)
        written.append(f"{arguments.plot}: the confusion matrix.")
    if arguments.errors is not None:
        errors = classes.list_errors()
        with arguments.errors.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, ["input", "class", "predicted", "probability"], lineterminator="\n")
            writer.writeheader()
            writer.writerows(errors)
        written.append(f"{arguments.errors}: {len(errors):,} of {len(classes.guesses):,} are guessed wrongly.")
    if arguments.json:
        return
    if arguments.per_class or len(classes.class_names) <= FEW:
        from revzoo.display.console import print_renderable
        from revzoo.display.tables.prediction import tabulate_classes

        print_renderable(tabulate_classes(classes.list_classes(), classes.average()))
    else:
        print(f"Each of the {len(classes.class_names):,} classes: --per-class.")
    print("\n".join(written), end="\n" if written else "")
