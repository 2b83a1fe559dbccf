"""`revzoo train`: train a model by a recipe, or resume a run."""

import argparse
import os
from contextlib import AbstractContextManager
from pathlib import Path

from revzoo.commands.parser import DEVICE_HINT, Parser, declare_import, split_overrides
from revzoo.errors import InputError, quote

SUMMARY = "Train a model by a recipe."


def declare(parser: Parser) -> None:
    """Add the arguments of `revzoo train`."""
    from revzoo.spec import list_recipes

    parser.epilog = (
        f"Recipes: {', '.join(list_recipes())}. Several GPUs: accelerate launch --num_processes N -m zoo_cli train ...; "
        "several processes without GPUs: ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_processes N -m zoo_cli "
        "train ...; a network divided over them: torchrun --nproc-per-node N -m zoo_cli train ... train.shard=full"
    )
    declare_import(parser)
    parser.hints |= dict.fromkeys(("--device", "--gpus", "--gpu", "--cpu"), DEVICE_HINT)
    parser.list_settings = _list_settings
    parser.add_argument(
        "recipe", nargs="*", help="a recipe's name or .yaml file (default: digits), and overrides such as optimizer.lr=1e-3"
    )
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument(
        "--print-config", action="store_true", help="print the recipe with all settings, and what each is, instead of training"
    )
    instead.add_argument(
        "--dry-run", action="store_true", help="stop before the first step: after data, model, memory, plan and gradients"
    )
    instead.add_argument("--resume", type=Path, metavar="DIR", help="continue the run in this folder")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of the run (default: a new one under runs/)")
    parser.add_argument(
        "--accept-changes", action="store_true", help="with --resume: go on although recipe or place of the data have changed"
    )


def _list_settings() -> list[str]:
    from revzoo.spec.parsing import list_paths
    from revzoo.training.options import Recipe

    return list_paths(Recipe)


def run(arguments: argparse.Namespace) -> int:
    """Train or resume."""
    from revzoo.training.terminal import share_terminal

    with share_terminal():
        code = _run(arguments)
    _leave_group()
    return code


def _show_status(what: str) -> AbstractContextManager[object]:
    """Say what is being done, in the first of several processes."""
    from revzoo.display.console import show_status

    return show_status(what, shown=os.environ.get("RANK", "0") == "0")


def _leave_group() -> None:
    """End the connections to other processes; a process that exits with them open may be aborted when another has gone."""
    from torch import distributed

    if distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


def _run(arguments: argparse.Namespace) -> int:
    recipes, overrides = split_overrides(arguments.recipe)
    if arguments.out is not None and (arguments.print_config or arguments.dry_run):
        raise InputError("Only training writes a folder. Received: --out with --print-config or --dry-run. Leave one out.")
    if arguments.resume is not None:
        if recipes or arguments.out is not None:
            raise InputError(
                "A resumed run keeps its recipe and its folder. Received: --resume with a recipe or --out. Use revzoo train "
                "--resume DIR, with overrides such as train.epochs=20 if it is to train longer."
            )
        with _show_status("loading the libraries"):
            from revzoo.training.loop import resume

        resume(arguments.resume, overrides, accept_changes=arguments.accept_changes)
        return 0
    if arguments.accept_changes:
        raise InputError("--accept-changes is for runs that go on. Received: no --resume DIR.")
    if len(recipes) > 1:
        words = [word for word in recipes[1:] if Path(word).exists()]
        example = quote(f"data.root={words[0]}") if words else "train.epochs=3"
        raise InputError(f"One run has one recipe. Received: {', '.join(recipes)}. Overrides look like {example}.")
    with _show_status("reading the recipe"):
        from revzoo.training.recipe import DEFAULT_RECIPE, load_recipe

        source = recipes[0] if recipes else DEFAULT_RECIPE
        recipe = load_recipe(source, overrides, complete=not arguments.print_config)  # refused before the loop is imported
    if arguments.print_config:
        with _show_status("reading the recipe"):
            from revzoo.training.recipe_text import write_recipe

        print(write_recipe(recipe), end="")
        return 0
    with _show_status("loading the libraries"):
        from revzoo.training.loop import preview, train

    if arguments.dry_run:
        preview(recipe)
    else:
        train(recipe, arguments.out)
    return 0
