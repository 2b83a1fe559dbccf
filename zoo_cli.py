"""The command line: revzoo list | show | profile | plan | convert | export | train | eval | check | tokenizer.

A command imports what it needs when it runs, so that `revzoo list` answers without torch.
"""

import argparse
import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from revzoo.errors import InputError, RevzooError, UnknownNameError

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from revzoo import Model, Plan


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
        from revzoo.display.figures.model import plot

        plot(found, arguments.plot)
    if arguments.json:
        print(json.dumps(found.to_dict(), indent=2))
    else:
        from revzoo.display.tables.model import show

        _print(show(found))
    return 0


def _print(what: Any) -> None:
    """Print a table or a group of them; 140 columns wide where nobody says how wide."""
    from rich.console import Console

    Console(highlight=False, width=None if sys.stdout.isatty() else 140).print(what)


def _require_png(path: Path) -> None:
    """Raise unless a picture can be written there, before anything is measured for it."""
    if path.suffix.lower() != ".png":
        raise InputError(f"A picture is written as PNG. Received: --plot {path}. Use --plot network.png.")
    _require_writable(path)


def _require_writable(path: Path) -> None:
    existed = path.exists()
    path.open("ab").close()
    if not existed:
        path.unlink()


def _profile(arguments: argparse.Namespace) -> int:
    from revzoo import profile
    from revzoo.analysis.report import usual_batch
    from revzoo.display.tables.plan import show_profile

    model = _model_to_plan(arguments)
    batch = model.example_input(arguments.batch or usual_batch(model.spec.input))
    found = profile(model, batch, _optimizer(arguments.optimizer, model), estimate=arguments.estimate)
    if arguments.json:
        print(json.dumps(asdict(found), indent=2))
    else:
        _print(show_profile(found))
    return 0


def _plan(arguments: argparse.Namespace) -> int:
    if arguments.plot is not None:
        _require_png(arguments.plot)
    if arguments.out is not None:
        _require_writable(arguments.out)
    from revzoo.planning.budget import budget_bytes

    model = _model_to_plan(arguments)
    budget_bytes(arguments.budget, next(model.parameters()).device)  # complains before anything is profiled
    found = (_plan_batches if isinstance(arguments.batch, tuple) else _plan_batch)(arguments, model)
    if arguments.out is not None:
        found.save(arguments.out)
        if not arguments.json:
            print(f"{arguments.out}: give it to a model with revzoo.Plan.load({str(arguments.out)!r}).apply(model).")
    return 0


def _plan_batch(arguments: argparse.Namespace, model: "Model") -> "Plan":
    """Plan one batch size; print and draw the plan."""
    from revzoo import profile, solve
    from revzoo.analysis.report import usual_batch
    from revzoo.display.tables.plan import front, others, show_plan
    from revzoo.planning.plan import checked

    batch = model.example_input(arguments.batch or usual_batch(model.spec.input))
    found = profile(model, batch, _optimizer(arguments.optimizer, model), estimate=arguments.estimate)
    plan = checked(model, batch, found, solve(found, arguments.budget, arguments.solver))
    beside, fixed_bytes = others(model, found), found.counted.fixed_bytes
    budgets = front(found) if arguments.plot is not None or arguments.json else []
    if arguments.plot is not None:
        from revzoo.display.figures.plan import plot_plan

        plot_plan(plan, arguments.plot, budgets, beside, fixed_bytes)
    if arguments.json:
        print(json.dumps({"plan": asdict(plan), "others": beside, "front": budgets, "fixed_bytes": fixed_bytes}, indent=2))
    else:
        _print(show_plan(plan, beside))
    return plan


def _plan_batches(arguments: argparse.Namespace, model: "Model") -> "Plan":
    """Look for the best batch size; print and draw its plan, and the others."""
    from revzoo.display.tables.plan import show_batches
    from revzoo.planning.batch import best_batch

    if arguments.estimate:
        raise InputError("Received: --estimate and a range of batch sizes, whose times are measured. Leave one out.")
    optimizer = _optimizer(arguments.optimizer, model)
    found = best_batch(model, arguments.budget, *arguments.batch, solver=arguments.solver, optimizer=optimizer)
    if arguments.plot is not None:
        from revzoo.display.figures.plan import plot_heatmap, plot_plan, plot_times

        rows = [asdict(row) for row in found.rows]
        plot_plan(found.plan, arguments.plot)
        plot_times(rows, arguments.plot.with_stem(f"{arguments.plot.stem}-times"))
        plot_heatmap(rows, found.plan.units, arguments.plot.with_stem(f"{arguments.plot.stem}-schedules"))
    if arguments.json:
        print(json.dumps(found.to_dict(), indent=2))
    else:
        _print(show_batches(found))
    return found.plan


def _model_to_plan(arguments: argparse.Namespace) -> "Model":
    """Return the model on the device that is to be planned for."""
    if arguments.meta and arguments.device is not None:
        raise InputError(f"Received: --meta and --device {arguments.device}. --meta runs on no device: leave one of them out.")
    import torch

    from revzoo import create

    torch.manual_seed(0)
    device = "meta" if arguments.meta else arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    return create(arguments.name, device=device, dtype=getattr(torch, arguments.dtype))


def _optimizer(name: str | None, model: "Model") -> "Optimizer | None":
    """Return timm's optimizer of that name for the model, or None where none is named."""
    if name is None:
        return None
    from timm.optim import create_optimizer_v2, list_optimizers

    if name not in list_optimizers():
        raise UnknownNameError("optimizer", name, map(str, list_optimizers()))
    try:
        return create_optimizer_v2(model, name, lr=1e-3)  # the size of its state is what counts
    except (TypeError, ValueError, LookupError, AssertionError, ImportError) as error:
        raise InputError(f"timm's {name} cannot be made here ({type(error).__name__}: {error}). Try adamw.") from error


def _convert(arguments: argparse.Namespace) -> int:
    from revzoo import convert

    report = convert(
        arguments.source,
        arguments.weights,
        coupling=arguments.coupling,
        kept_bits=None if arguments.strength is not None else arguments.kept_bits,
        strength=arguments.strength,
        out=arguments.out,
        partial=arguments.partial,
    )
    if arguments.json:
        print(json.dumps(report.to_dict(), indent=2))
    else:
        print(report)
        moves = "" if report.coupling.get("kept_bits") == 8 else " coupling=null"
        print(f"{arguments.out}: fine-tune it with revzoo train finetune model={arguments.out} data.root=IMAGES{moves}")
    return 0


def _export(arguments: argparse.Namespace) -> int:
    from revzoo import export

    count = export(arguments.folder, arguments.out, arguments.weights)
    print(f"{arguments.out}: {count} tensors under the source's names.")
    return 0


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
    from revzoo.training.recipe import DEFAULT_RECIPE, load_recipe

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
    from revzoo.data.tokenizer import train_tokenizer

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


def _batch(text: str) -> int | tuple[int, int]:
    """Return a batch size, or the range in "auto:16-256"."""
    if not text.startswith("auto"):
        return _count(text)
    low, _, high = text.removeprefix("auto:").partition("-")
    if not (low.isdecimal() and high.isdecimal() and 1 <= int(low) <= int(high) <= 10**9):
        raise argparse.ArgumentTypeError(f"a range goes from low to high, such as auto:16-256. Received: {text!r}")
    return int(low), int(high)


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
    parser.add_argument("--exact", action="store_true", help="keep the streams on a grid, so that inversion does not round")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of weights and streams (default: float32)")


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


def _declare_profile(parser: Parser) -> None:
    _declare_model(parser, _count, "N", "examples (default: 32 images, or 8 texts)")
    parser.add_argument("--json", action="store_true", help="print everything as JSON instead")


def _declare_plan(parser: Parser) -> None:
    parser.epilog = (
        "Everything alive at the peak has to fit: weights, gradients, batch, activations, and the state of the optimizer if "
        "one is named. With --batch auto:LOW-HIGH, --plot plan.png also writes plan-times.png and plan-schedules.png, over "
        "the batch sizes."
    )
    batch_help = "examples (default: 32 images, or 8 texts), or a range in which to look for the fastest, such as auto:16-256"
    _declare_model(parser, _batch, "N|auto:LOW-HIGH", batch_help)
    parser.add_argument(
        "--budget",
        required=True,
        metavar="SIZE",
        help="such as 8GiB, 60%% of the device's memory, or auto: nine tenths of what is free",
    )
    parser.add_argument(
        "--solver",
        choices=("timeline", "knapsack"),
        default="timeline",
        help="timeline is exact; knapsack is the published additive model, to compare with (default: timeline)",
    )
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="save the plan")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw memory over time, the schedule and other budgets")
    parser.add_argument("--json", action="store_true", help="print everything, and what --plot draws, as JSON instead")


def _declare_model(parser: Parser, batch: Callable[[str], object], metavar: str, batch_help: str) -> None:
    """Declare what a profile is of."""
    parser.add_argument("name", help="a model name, a spec file or a folder with spec.yaml")
    parser.add_argument("--batch", type=batch, metavar=metavar, help=batch_help)
    parser.add_argument("--device", metavar="D", help="where to run (default: cuda where there is one, else cpu)")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of weights and streams (default: float32)")
    parser.add_argument(
        "--optimizer",
        metavar="NAME",
        help="a timm optimizer, such as adamw, whose state counts (default: none, which counts no state)",
    )
    parser.add_argument("--meta", action="store_true", help="count bytes and FLOPs only: nothing is allocated, run or timed")
    parser.add_argument(
        "--estimate",
        action="store_true",
        help="run the leanest schedule alone, and take the forward of a unit for what a mode adds: quicker, and less to run",
    )


def _declare_convert(parser: Parser) -> None:
    parser.epilog = (
        "momentum starts as nearly the original's function, additive as another one with the same tensors. The folder can be "
        "given to every command that takes a model."
    )
    parser.add_argument(
        "source",
        help="a timm name, a folder with a Transformers config.json, or a reversible model, for its published weights",
    )
    parser.add_argument("--weights", metavar="FILE", help="safetensors, .pth, .bin, or an index of shards (default: the hub's)")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write, new or empty")
    parser.add_argument(
        "--coupling",
        choices=("momentum", "dual_residual", "additive"),
        default="momentum",
        help="how the two streams meet (default: momentum)",
    )
    parser.add_argument(
        "--kept-bits", type=int, choices=range(9), default=8, metavar="S", help="b = 2^-S, exactly invertible (default: 8)"
    )
    parser.add_argument("--strength", type=float, metavar="B", help="b in floating point instead, without kept bits")
    parser.add_argument("--partial", action="store_true", help="begin missing tensors fresh, and drop extra ones")
    parser.add_argument("--json", action="store_true", help="print the report as JSON instead")


def _declare_export(parser: Parser) -> None:
    parser.add_argument("folder", type=Path, help="a folder that revzoo convert wrote")
    parser.add_argument("--weights", type=Path, metavar="FILE", help="trained weights of it (default: the folder's own)")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.safetensors", help="the file to write")


def _declare_list(parser: Parser) -> None:
    parser.add_argument("pattern", nargs="?", default="*", help="shell-style, such as 'rev_vit*'")
    parser.add_argument(
        "--table", type=Path, metavar="DIR", help="measure these models and bring zoo.json and zoo.md in DIR up to date instead"
    )


DTYPES = ("float64", "float32", "bfloat16", "float16")

COMMANDS = {
    "list": Command("List the models.", _declare_list, _list),
    "show": Command("Show what a model consists of, what it stores and what it rebuilds.", _declare_show, _show),
    "profile": Command("Measure what every part of a model keeps and takes in every mode.", _declare_profile, _profile),
    "plan": Command("Find the fastest mix of modes that fits a memory budget.", _declare_plan, _plan),
    "convert": Command("Make a pretrained network reversible.", _declare_convert, _convert),
    "export": Command("Write a converted network's weights under the original's names.", _declare_export, _export),
    "train": Command("Train a model by a recipe.", _declare_train, _train),
    "eval": Command("Evaluate what was trained, or shipped weights.", _declare_eval, _eval),
    "check": Command("Compare a model's gradients with those of the stored run.", _declare_check, _check),
    "tokenizer": Command("Train a tokenizer for texts of your own.", _declare_tokenizer, _tokenizer),
}

if __name__ == "__main__":
    sys.exit(main())
