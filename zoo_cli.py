"""The command line: revzoo list | show | train | eval | check | tokenizer.

A command imports what it needs when it runs, so that `revzoo list` answers without torch.
"""

import argparse
import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from revzoo.errors import InputError, RevzooError, UnknownNameError


class Parser(argparse.ArgumentParser):
    """An argument parser whose complaints are errors like any other, with the nearest option."""

    def __init__(self, **settings: Any):
        self.options: list[str] = []
        super().__init__(allow_abbrev=False, **settings)

    def add_argument(self, *names: str, **settings: Any) -> argparse.Action:
        """Add an argument and remember how its option is called."""
        self.options += [name for name in names if name.startswith("-")]
        return super().add_argument(*names, **settings)

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Return the parsed arguments; positional ones may stand anywhere among the options."""
        parsed, rest = self.parse_known_intermixed_args(arguments)
        if rest and rest[0].startswith("-"):
            raise UnknownNameError(f"option of {self.prog}", rest[0].partition("=")[0], self.options)
        if rest:
            self.error(f"unexpected argument {rest[0]!r}")
        return parsed

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing the usage and leaving."""
        raise InputError(f"{message[:1].upper()}{message[1:]}. See {self.prog} --help.")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return 0, 1 for a check that failed, 2 for a mistake, 128 + signal when stopped."""
    name, *rest = (sys.argv[1:] if argv is None else list(argv)) or ["--help"]
    # Threads that spin while they wait make small models ten times slower where something else uses the cores as well.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        if name in ("-h", "--help", "--version"):
            return _about(name)
        if name not in COMMANDS:
            raise UnknownNameError("command", name, COMMANDS)
        command = COMMANDS[name]
        parser = Parser(prog=f"revzoo {name}", description=command.summary)
        command.declare(parser)
        return command.run(parser.parse(rest))
    except RevzooError as error:
        print(f"revzoo: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"revzoo: cannot read or write {error.filename or 'a file'}: {error.strerror or error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stopped:
        print(f"\nrevzoo: {stopped if stopped.args else 'stopped'}", file=sys.stderr)
        return 128 + getattr(stopped, "signum", 2)


@dataclass(frozen=True)
class Command:
    """A subcommand: one line about it, its arguments, and what it does; `run` returns the exit status."""

    summary: str
    declare: Callable[[Parser], object]
    run: Callable[[argparse.Namespace], int]


def _about(option: str) -> int:
    import revzoo

    if option == "--version":
        print(f"revzoo {revzoo.__version__}")
    else:
        print("usage: revzoo COMMAND [...]\n\nA zoo of reversible networks for PyTorch.\n")
        print("\n".join(f"  {name:<9} {command.summary}" for name, command in COMMANDS.items()))
        print("\nrevzoo COMMAND --help says more.")
    return 0


def _list(arguments: argparse.Namespace) -> int:
    from revzoo.spec import list_models

    names = list_models(arguments.pattern)
    if not names:
        raise UnknownNameError("model", arguments.pattern, list_models())
    if arguments.table is None:
        print("\n".join(names))
    else:
        from revzoo.analysis.zoo import update

        update(arguments.table, names)
    return 0


def _show(arguments: argparse.Namespace) -> int:
    if arguments.plot is not None:
        _require_png(arguments.plot)
    from revzoo import create
    from revzoo.analysis.report import report

    model = create(arguments.name, device="meta")
    found = report(model, arguments.batch)
    if arguments.plot is not None:
        from revzoo.analysis.plot import plot

        plot(found, arguments.plot)
    if arguments.json:
        print(json.dumps(found.to_dict(), indent=2))
    else:
        from rich.console import Console

        from revzoo.analysis.show import show

        Console(highlight=False, width=None if sys.stdout.isatty() else 140).print(show(found))
    return 0


def _require_png(path: Path) -> None:
    """Raise unless a picture can be written there, before anything is measured for it."""
    if path.suffix.lower() != ".png":
        raise InputError(f"A picture is written as PNG. Received: --plot {path}. Use --plot network.png.")
    existed = path.exists()
    path.open("ab").close()
    if not existed:
        path.unlink()


def _train(arguments: argparse.Namespace) -> int:
    recipes, overrides = _split(arguments.recipe)
    if arguments.resume is not None:
        if recipes or overrides or arguments.out is not None:
            raise InputError(
                "A resumed run keeps its recipe. Received: --resume with more. Use revzoo train --resume DIR alone."
            )
        from revzoo.training.loop import resume

        resume(arguments.resume)
        return 0
    if len(recipes) > 1:
        raise InputError(f"One run has one recipe. Received: {', '.join(recipes)}. Overrides look like train.epochs=3.")
    from revzoo.training.config import DEFAULT_RECIPE, load_recipe

    recipe = load_recipe(recipes[0] if recipes else DEFAULT_RECIPE, overrides)
    from revzoo.training.loop import train

    train(recipe, arguments.out)
    return 0


def _eval(arguments: argparse.Namespace) -> int:
    targets, overrides = _split(arguments.target)
    if len(targets) + (arguments.pretrained is not None) != 1:
        raise InputError("Name one thing to evaluate: the folder of a run, a checkpoint in it, or --pretrained NAME.")
    from revzoo.training.evaluation import evaluate_checkpoint, evaluate_pretrained

    if targets:
        scores = evaluate_checkpoint(Path(targets[0]), overrides)
        print(f"{targets[0]}: {scores}")
        if not math.isfinite(scores.loss):
            print("revzoo: the loss is not finite: the model's outputs are not all numbers.", file=sys.stderr)
            return 1
        return 0
    scores, entry = evaluate_pretrained(arguments.pretrained, overrides)
    print(f"{arguments.pretrained}: {scores}")
    same = abs(scores.top1 - entry.metric["top1"]) < 0.005  # the index has two decimals
    print(f"The index says top-1 {entry.metric['top1']:.2f} %: {'the same' if same else 'NOT the same'}.")
    return 0 if same else 1


def _check(arguments: argparse.Namespace) -> int:
    import torch

    from revzoo import create, verify

    torch.manual_seed(0)
    model = create(arguments.name, dtype=getattr(torch, arguments.dtype), exact=arguments.exact)
    report = verify(model, model.example_input(arguments.batch))
    print(report)
    return 0 if report.ok else 1


def _tokenizer(arguments: argparse.Namespace) -> int:
    from revzoo.training.tokenizer import train_tokenizer

    size, padding = train_tokenizer(arguments.files, arguments.vocabulary, arguments.out, arguments.kind, arguments.column)
    print(
        f"{arguments.out}: {size} tokens. Use it with data.text.tokenizer={arguments.out} "
        f"model.overrides=[input.vocabulary={size},input.padding={padding}]"
    )
    return 0


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    """Return the names and the overrides among positional arguments; what exists under that name is no override."""
    overrides = [word for word in words if "=" in word and not Path(word).exists()]
    return [word for word in words if word not in overrides], overrides


def _count(text: str) -> int:
    if not (text.isdecimal() and 1 <= int(text) <= 10**9):
        raise argparse.ArgumentTypeError(f"expected an integer from 1 to 10^9. Received: {text!r}")
    return int(text)


def _declare_train(parser: Parser) -> None:
    from revzoo.spec import list_recipes

    parser.epilog = (
        f"Recipes: {', '.join(list_recipes())}. Several GPUs: accelerate launch --num_processes N -m zoo_cli train ...; "
        "several processes without GPUs: ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_processes N -m zoo_cli "
        "train ..."
    )
    parser.add_argument(
        "recipe", nargs="*", help="a recipe's name or .yaml file (default: digits), and overrides such as optimizer.lr=1e-3"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of the run (default: a new one under runs/)")
    parser.add_argument("--resume", type=Path, metavar="DIR", help="go on with the run in this folder")


def _declare_eval(parser: Parser) -> None:
    parser.add_argument(
        "target", nargs="*", help="the folder of a run or a checkpoint in it, and overrides such as data.root=/elsewhere"
    )
    parser.add_argument("--pretrained", metavar="NAME", help="evaluate the weights that ship for this model")


def _declare_check(parser: Parser) -> None:
    parser.add_argument("name", help="a model name, a spec file or a folder with spec.yaml")
    parser.add_argument("--batch", type=_count, default=4, metavar="N", help="images (default: 4)")
    choices = ("float64", "float32", "bfloat16", "float16")
    parser.add_argument("--exact", action="store_true", help="keep the streams on a grid, so that inversion does not round")
    parser.add_argument("--dtype", choices=choices, default="float32", help="of weights and streams (default: float32)")


def _declare_tokenizer(parser: Parser) -> None:
    parser.epilog = (
        "bytes is byte-level BPE with RoBERTa's special tokens. wordpiece is BERT's, uncased; it numbers its tokens "
        "differently each time: keep the file."
    )
    parser.add_argument("files", nargs="+", type=Path, help="text files, or tables (.csv, .jsonl, .json, .parquet)")
    parser.add_argument("--vocabulary", type=_count, required=True, metavar="N", help="most tokens to have, such as 8000")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="where to write it, such as tokenizer.json")
    parser.add_argument("--kind", choices=("bytes", "wordpiece"), default="bytes", help="of tokens (default: bytes)")
    parser.add_argument("--column", default="text", metavar="NAME", help="column of the texts in tables (default: text)")


def _declare_show(parser: Parser) -> None:
    parser.add_argument("name", help="a model name, a spec file or a folder with spec.yaml")
    parser.add_argument(
        "--batch", type=_count, metavar="N", help="examples to count bytes for (default: 32 images, or 8 texts)"
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON instead")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the network, and what each part of it keeps, too")


def _declare_list(parser: Parser) -> None:
    parser.add_argument("pattern", nargs="?", default="*", help="shell-style, such as 'rev_vit*'")
    parser.add_argument(
        "--table", type=Path, metavar="DIR", help="measure these models and bring zoo.json and zoo.md in DIR up to date instead"
    )


COMMANDS = {
    "list": Command("List the models.", _declare_list, _list),
    "show": Command("Show what a model consists of, what it stores and what it rebuilds.", _declare_show, _show),
    "train": Command("Train a model by a recipe.", _declare_train, _train),
    "eval": Command("Evaluate what was trained, or shipped weights.", _declare_eval, _eval),
    "check": Command("Compare a model's gradients with those of the stored run.", _declare_check, _check),
    "tokenizer": Command("Train a tokenizer for texts of your own.", _declare_tokenizer, _tokenizer),
}

if __name__ == "__main__":
    sys.exit(main())
