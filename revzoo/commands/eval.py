"""`revzoo eval`: the metrics of a trained run, or of weights that ship."""

import argparse
import math
import sys
from pathlib import Path

from revzoo.commands.parser import Parser, declare_import, split_overrides
from revzoo.errors import InputError
from revzoo.spec.names import model_files, require_checkpoint

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


def run(arguments: argparse.Namespace) -> int:
    """Evaluate and print the metrics; 1 if the loss is not finite or shipped weights do not reach the metric of their index."""
    targets, overrides = split_overrides(arguments.target)
    if len(targets) != 1:
        raise InputError("Name one thing to evaluate: the folder of a run, a checkpoint in it, or a model whose weights ship.")
    if targets[0] not in model_files():
        require_checkpoint(targets[0])
    from revzoo.display.console import print_text, show_status

    with show_status("evaluating"):
        from revzoo.checkpoint.index import read_index
        from revzoo.metric import CHOSEN
        from revzoo.training.evaluate_checkpoint import evaluate_checkpoint, evaluate_pretrained

        if targets[0] in read_index():  # as for every command, a name goes before a folder that has it
            scores, entry = evaluate_pretrained(targets[0], overrides)
        else:
            scores, entry = evaluate_checkpoint(Path(targets[0]), overrides), None
    for note in scores.notes:
        print_text(f"Note: {note}.")
    print_text(f"{targets[0]}: {scores}")
    if entry is None:
        if not math.isfinite(scores.loss):
            print("revzoo: the loss is not finite: the model returns infinities or NaN.", file=sys.stderr)
            return 1
        return 0
    expected = entry.metric[CHOSEN.key]
    same = abs(scores.metrics[CHOSEN.key] - expected) < 0.005  # the index has two decimals
    print(f"The index says {CHOSEN.label} {CHOSEN.format(expected)}: {'the same' if same else 'NOT the same'}.")
    return 0 if same else 1
