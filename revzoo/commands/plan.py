"""`revzoo plan`: the fastest schedule within a memory budget, for a batch size or the best of a range."""

import argparse
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from revzoo.commands.model_options import (
    BATCH_HELP,
    create_batch,
    create_loss,
    create_model,
    create_optimizer,
    declare_model,
    is_any_module,
    read_name,
)
from revzoo.commands.parser import NAME_HELP, Parser, batch_or_range, require_png, require_writable
from revzoo.errors import InputError

if TYPE_CHECKING:
    from revzoo.graph import ModulePlan
    from revzoo.model.model import Model
    from revzoo.planning.plan import Plan
    from revzoo.planning.profiling.profile import Profile

SUMMARY = "Find the fastest mix of modes that fits a memory budget."

OTHER_NAMES = "timm:NAME, hf:OWNER/NAME, a folder with the config.json of a Transformers model, or package.module:function"
_OF_THE_ZOO = ("--device", "--lookahead", "--tiles", "--dtype", "--meta", "--loss", "--accumulate")


def declare(parser: Parser) -> None:
    """Add the arguments of `revzoo plan`."""
    parser.epilog = (
        "Everything alive at the peak has to fit: weights, gradients, batch, activations, and the state of the optimizer if "
        "one is named."
    )
    batch_help = f"{BATCH_HELP}, or a range to search for the most samples per second, such as auto:16-256"
    declare_model(parser, batch_or_range, "N|auto:LOW-HIGH", batch_help, f"{NAME_HELP}, or {OTHER_NAMES}")
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
        help="timeline is exact; knapsack, for comparison, is the published method for models of the zoo (default: timeline)",
    )
    parser.add_argument("--lookahead", type=int, choices=(0, 1), help="steps recovered ahead of backward (default: 0)")
    parser.add_argument(
        "--tiles", choices=("auto",), help="cut steps into tiles where that is faster, or fits alone (default: whole steps)"
    )
    parser.add_argument(
        "--loss",
        choices=("cross_entropy", "sum"),
        help="what keeps memory for backward after the model: cross_entropy of its outputs, or their sum, which keeps none "
        "(default: cross_entropy for a classifier or language model, else sum)",
    )
    parser.add_argument(
        "--accumulate", action="store_true", help="count the gradients of earlier batches, which a step adds to"
    )
    parser.add_argument(
        "--profile",
        action="store_true",
        help="for modules that are not the zoo's: time every call on this machine, and plan by time instead of FLOPs",
    )
    parser.add_argument(
        "--compiled",
        action="store_true",
        help="for modules that are not the zoo's: the budget is for the compiled module, which is measured on this machine",
    )
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="save the plan")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw memory over time, the schedule and other budgets")
    parser.add_argument("--json", action="store_true", help="print everything, and the data of --plot, as JSON instead")


def run(arguments: argparse.Namespace) -> int:
    """Plan a model; print, draw and save the plan."""
    if arguments.plot is not None:
        require_png(arguments.plot)
    if arguments.out is not None:
        require_writable(arguments.out)
    name, overrides = read_name(arguments.name, of_any_module=True)
    plan = _plan_any_module(arguments, name, overrides) if is_any_module(name) else _plan_of_the_zoo(arguments)
    if arguments.out is not None:
        plan.save(arguments.out)
        if not arguments.json:
            load = f"revzoo.{type(plan).__name__}.load({str(arguments.out)!r})"
            print(f"{arguments.out}: give it to the model with {load}.apply(model).")
    return 0


def _plan_any_module(arguments: argparse.Namespace, name: str, overrides: Sequence[str]) -> "ModulePlan":
    """Plan a module that is not the zoo's; print and draw the plan."""
    _refuse(arguments, "models of the zoo", *_OF_THE_ZOO)
    if overrides or arguments.solver == "knapsack" or isinstance(arguments.batch, tuple):
        raise InputError(
            f"Overrides, --solver knapsack and ranges of batch sizes: for models of the zoo. Received: {name}. Leave them out."
        )
    from revzoo.display.console import print_result, show_status

    with show_status("planning") as report:
        import torch

        from revzoo.analysis.dry_run import compute_usual_loss
        from revzoo.graph import plan_module
        from revzoo.graph.named_module import create_named_module
        from revzoo.graph.plan_table import tabulate_module_plan

        torch.manual_seed(0)
        module, batch = create_named_module(name, arguments.batch)
        optimizer = create_optimizer(arguments.optimizer, module)
        settings = {"optimizer": optimizer, "loss": compute_usual_loss, "profile": arguments.profile, "report": report}
        plan, details = plan_module(module, batch, arguments.budget, compiled=arguments.compiled, **settings)
    if arguments.plot is not None:
        from revzoo.graph.plan_figure import plot_module_plan

        plot_module_plan(plan, details, arguments.plot)
    data = {"plan": asdict(plan), "details": asdict(details)}
    print_result(data, tabulate_module_plan(plan, details), as_json=arguments.json)
    return plan


def _plan_of_the_zoo(arguments: argparse.Namespace) -> "Plan":
    """Plan a model of the zoo; print and draw the plan."""
    _refuse(arguments, "modules that are not of the zoo", "--profile", "--compiled")
    from revzoo.display.console import show_status

    with show_status("creating the model"):
        from revzoo.analysis.dry_run import accumulated_gradients
        from revzoo.planning.budget import parse_budget

        model = create_model(arguments)
        parse_budget(arguments.budget, next(model.parameters()).device)  # refuses a wrong budget before anything is profiled
        settings = {
            "solver": arguments.solver,
            "optimizer": create_optimizer(arguments.optimizer, model),
            "loss": create_loss(arguments.loss, model),
            "lookahead": arguments.lookahead or 0,
        }
    with accumulated_gradients(model) if arguments.accumulate else nullcontext():
        if isinstance(arguments.batch, tuple):
            _refuse(arguments, "one batch size", "--tiles")
            return _plan_batches(arguments, model, settings)
        from revzoo.planning.planner import profile_and_plan

        with show_status("planning"):
            batch = create_batch(model, arguments.batch)
            profile, plan = profile_and_plan(model, batch, arguments.budget, tiles=arguments.tiles, **settings)
        return _show(arguments, model, profile, plan)


def _refuse(arguments: argparse.Namespace, users: str, *options: str) -> None:
    """Raise InputError for those of the options that were given: they would have no effect."""
    values = {option: getattr(arguments, option.strip("-").replace("-", "_")) for option in options}
    if given := [option for option, value in values.items() if value is not None and value is not False]:
        raise InputError(f"{', '.join(given)}: for {users}. Received: {' '.join(arguments.name)}. Leave it out otherwise.")


def _show(arguments: argparse.Namespace, model: "Model", profile: "Profile", plan: "Plan") -> "Plan":
    """Draw a plan, and print it next to other schedules, or everything as JSON; return it."""
    from revzoo.display.console import print_result
    from revzoo.display.tables.plan import tabulate_plan
    from revzoo.planning.comparison import evaluate_budgets, evaluate_uniform_schedules

    others, fixed_bytes = evaluate_uniform_schedules(model, profile), profile.memory.fixed_bytes
    budgets = evaluate_budgets(profile) if arguments.plot is not None or arguments.json else []
    if arguments.plot is not None:
        from revzoo.display.figures.plan import plot_plan

        plot_plan(plan, arguments.plot, budgets, others, fixed_bytes)
    data = {"plan": asdict(plan), "others": others, "front": budgets, "fixed_bytes": fixed_bytes}
    print_result(data, tabulate_plan(plan, others), as_json=arguments.json)
    return plan


def _plan_batches(arguments: argparse.Namespace, model: "Model", settings: dict[str, Any]) -> "Plan":
    """Find the batch size with the most samples per second; print and draw its plan, and the other sizes."""
    from revzoo.display.console import print_result, show_status
    from revzoo.display.tables.plan import tabulate_batches
    from revzoo.planning.batch import find_best_batch

    with show_status("planning every batch size"):
        best = find_best_batch(model, arguments.budget, *arguments.batch, **settings)
    if arguments.plot is not None:
        from revzoo.display.figures.plan import plot_plan

        plot_plan(best.plan, arguments.plot)
    print_result(best.to_dict(), tabulate_batches(best), as_json=arguments.json)
    return best.plan
