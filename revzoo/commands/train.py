"""`revzoo train`: train a model by a recipe, or resume a run."""

import argparse
import re
from pathlib import Path

from revzoo.commands.parser import Parser, declare_import, split_overrides
from revzoo.errors import InputError
from revzoo.hub import is_foreign
from revzoo.spec.loading import find_spec_file

SUMMARY = "Train a model by a recipe."
# What --smoke stands for. Typed overrides go before it; nothing is sent to a tracker.
_SMOKE = (
    *("train.epochs=1", "train.max_updates=3", "data.batch_size=8", "data.limit=64", "schedule.warmup_epochs=0"),
    "train.track=[]",
)


def declare(parser: Parser) -> None:
    """Add the arguments of `revzoo train`."""
    from revzoo.spec import list_recipes

    parser.epilog = (
        f"Recipes: {', '.join(list_recipes())}. Several GPUs: accelerate launch --num_processes N -m zoo_cli train ...; "
        "several processes without GPUs: ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_processes N -m zoo_cli "
        "train ...; a network divided over them: torchrun --nproc-per-node N -m zoo_cli train ... train.shard=full. "
        "A GPU is used where there is one: CUDA_VISIBLE_DEVICES chooses it, ACCELERATE_USE_CPU=true the CPU."
    )
    declare_import(parser)
    parser.add_argument(
        "recipe", nargs="*", help="a recipe's name or .yaml file (default: digits), and overrides such as optimizer.lr=1e-3"
    )
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--print-config", action="store_true", help="print the recipe with all settings instead of training")
    instead.add_argument(
        "--dry-run", action="store_true", help="stop before the first step: after data, model, memory, plan and gradients"
    )
    instead.add_argument(
        "--smoke", action="store_true", help=f"see whether everything works, in seconds, and keep nothing: {' '.join(_SMOKE)}"
    )
    instead.add_argument("--resume", type=Path, metavar="DIR", help="continue the run in this folder")
    instead.add_argument("--out", type=Path, metavar="DIR", help="folder of the run (default: a new one under runs/)")
    parser.add_argument(
        "--accept-changes", action="store_true", help="with --resume: go on although recipe or place of the data have changed"
    )


def run(arguments: argparse.Namespace) -> int:
    """Train or resume."""
    from revzoo.training.terminal import share_terminal

    with share_terminal():
        code = _run(arguments)
    _leave_group()
    return code


def _leave_group() -> None:
    """End the connections to other processes; a process that exits with them open may be aborted when another has gone."""
    from torch import distributed

    if distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


def _run(arguments: argparse.Namespace) -> int:
    from revzoo.display.console import show_status
    from revzoo.training.terminal import read_rank

    loading = show_status("loading PyTorch", shown=read_rank() == 0)
    recipes, overrides = split_overrides(arguments.recipe)
    if arguments.resume is not None:
        if recipes:
            raise InputError(
                f"A resumed run keeps its recipe. Received: --resume and {recipes[0]}. An override such as train.epochs=20 "
                "lets it train longer."
            )
        with loading:
            from revzoo.training.loop import resume

        resume(arguments.resume, overrides, accept_changes=arguments.accept_changes)
        return 0
    if arguments.accept_changes:
        raise InputError("--accept-changes is for runs that go on. Received: no --resume DIR.")
    if len(recipes) > 1:
        raise InputError(f"One run has one recipe. Received: {', '.join(recipes)}. Overrides look like data.root=DIR.")
    for word in overrides:
        path, _, name = word.partition("=")
        if path in ("model", "model.name") and re.fullmatch(r"[\w./~-]+", name) and not is_foreign(name):
            find_spec_file(name)  # a wrong name is refused before torch is imported
    from revzoo.training.recipe import DEFAULT_RECIPE, load_recipe

    if arguments.smoke:
        overrides = [*_SMOKE, *overrides]
    with loading:  # from here on: the names that only timm knows are checked last
        trains = not arguments.print_config
        recipe = load_recipe(recipes[0] if recipes else DEFAULT_RECIPE, overrides, complete=trains, has_data=trains)
        if trains:
            from revzoo.training.loop import preview, train, try_out
    if arguments.print_config:
        print(recipe.to_yaml(), end="")
    elif arguments.dry_run:
        preview(recipe)
    elif arguments.smoke:
        try_out(recipe)
    else:
        train(recipe, arguments.out)
    return 0
