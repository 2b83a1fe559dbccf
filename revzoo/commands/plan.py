"""`revzoo plan`: the fastest schedule within a memory budget, for a batch size, the best of a range, or one of many ranks."""

import argparse
import json
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from revzoo.commands.any_module import NAMES_HELP, create_any_module, is_any_module
from revzoo.commands.model_name import read_name
from revzoo.commands.model_options import BATCH_HELP, create_batch, create_loss, create_model, create_optimizer, declare_model
from revzoo.commands.parser import NAME_HELP, Parser, batch_or_range, require_png, require_writable
from revzoo.errors import InputError, join_names

if TYPE_CHECKING:
    from revzoo.model.network import Model
    from revzoo.planning.plan import Plan
    from revzoo.planning.profiling.profile import Profile
    from revzoo.planning.ranks.rank_plan import RankPlan
    from revzoo.runtime.lookahead_setting import LookaheadOption

SUMMARY = "Find the fastest mix of modes that fits a memory budget."

_LOOKAHEADS: dict[str, "LookaheadOption"] = {"0": 0, "1": 1, "auto": "auto"}
_OF_RANKS = ("--shard", "--nodes", "--offload")
_OF_RUNNING = ("--device", "--estimate", "--lookahead")
_OF_THE_ZOO = (*_OF_RUNNING, "--dtype", "--meta", "--loss", "--accumulate", "--ranks", *_OF_RANKS)
_DEFAULTS = {"--dtype": "float32", "--lookahead": "0"}  # of those that have one


def declare(parser: Parser) -> None:
    """Add the arguments of `revzoo plan`."""
    parser.epilog = (
        "Everything alive at the peak has to fit: weights, gradients, batch, activations, and the state of the optimizer if "
        "one is named. With --batch auto:LOW-HIGH, --plot plan.png also writes plan-times.png and plan-schedules.png, over "
        "the batch sizes."
    )
    batch_help = f"{BATCH_HELP}, or a range to search for the most samples per second, such as auto:16-256"
    declare_model(parser, batch_or_range, "N|auto:LOW-HIGH", batch_help, f"{NAME_HELP}, {NAMES_HELP}")
    parser.add_argument(
        "--budget",
        required=True,
        metavar="SIZE",
        help="such as 8GiB, 60%% of the device's memory, or auto: nine tenths of what is free",
    )
    parser.add_argument(
        "--solver",
        choices=("timeline", "knapsack", "reforwarding"),
        default="timeline",
        help="timeline is exact; for comparison, published methods: knapsack for models of the zoo, reforwarding for other "
        "modules (default: timeline)",
    )
    parser.add_argument(
        "--lookahead",
        choices=("0", "1", "auto"),
        default="0",
        help="steps recovered ahead of backward; auto plans and times both (default: 0)",
    )
    parser.add_argument(
        "--loss",
        choices=("cross_entropy", "sum"),
        help="what keeps memory for backward behind the model: cross_entropy of its outputs, or their sum, which keeps none "
        "(default: cross_entropy for a classifier or language model of the zoo, else sum)",
    )
    parser.add_argument(
        "--accumulate", action="store_true", help="count the gradients of earlier batches, which a step adds to"
    )
    parser.add_argument(
        "--profile",
        action="store_true",
        help="for modules that are not the zoo's: time every call on this machine, and plan by time instead of FLOPs",
    )
    parser.add_argument("--ranks", type=int, metavar="N", help="plan for one of N processes; counted, nothing is run")
    parser.add_argument(
        "--shard",
        choices=("none", "full", "hybrid"),
        help="how the ranks divide the network: over all of them, over those of each node, or not (default: full)",
    )
    parser.add_argument("--nodes", type=int, metavar="N", help="machines that the ranks are on (default: 1)")
    parser.add_argument(
        "--offload", action="store_true", help="the ranks keep shards, gradients and optimizer state on the host"
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
    name, overrides = read_name(arguments.name)
    if is_any_module(name):
        return _plan_any_module(arguments, name, overrides)
    if arguments.solver == "reforwarding":
        raise InputError(f"--solver reforwarding is for modules that are not of the zoo. Received: {name}.")
    if arguments.profile:
        raise InputError("Models of the zoo are always timed where they can be run. Received: --profile. Leave it out.")
    if arguments.ranks is not None:
        _require_counting(arguments)
        arguments.meta = True
    elif unused := _list_given(arguments, _OF_RANKS):
        raise InputError(f"Only ranks take {join_names(unused)}. Received: no --ranks. Add --ranks N.")
    from revzoo.display.console import show_status

    with show_status("loading the model"):
        from revzoo.analysis.dry_run import accumulated_gradients
        from revzoo.planning.budget import parse_budget

        model = create_model(arguments)
        parse_budget(arguments.budget, next(model.parameters()).device)  # refuses a wrong budget before anything is profiled
    make_plan = _plan_ranks if arguments.ranks is not None else _plan_batch
    make_plan = _plan_batches if isinstance(arguments.batch, tuple) else make_plan
    with accumulated_gradients(model) if arguments.accumulate and arguments.ranks is None else nullcontext():
        plan = make_plan(arguments, model)
    if arguments.out is not None:
        plan.save(arguments.out)
        if not arguments.json:
            print(f"{arguments.out}: give it to a model with revzoo.Plan.load({str(arguments.out)!r}).apply(model).")
    return 0


def _plan_any_module(arguments: argparse.Namespace, name: str, overrides: Sequence[str]) -> int:
    """Plan a module that is not the zoo's; print, draw and save the plan."""
    from revzoo.display.console import show_status

    unused = _list_given(arguments, _OF_THE_ZOO) + ["overrides"] * bool(overrides)
    unused += ["--solver knapsack"] * (arguments.solver == "knapsack")
    if unused:
        raise InputError(f"Only models of the zoo take {join_names(unused)}. Received: {name}.")
    if isinstance(arguments.batch, tuple):
        raise InputError(f"A range of batch sizes is for models of the zoo. Received: {name}. Give one size.")
    with show_status("planning"):
        import torch

        from revzoo.planning.reforwarding.planner import plan_in_detail

        torch.manual_seed(0)
        module, batch = create_any_module(name, arguments.batch)
        optimizer = create_optimizer(arguments.optimizer, module)
        plan, details = plan_in_detail(
            module, batch, arguments.budget, solver=arguments.solver, optimizer=optimizer, profile=arguments.profile
        )
    if arguments.plot is not None:
        with show_status("drawing"):
            from revzoo.display.figures.module_plan import plot_module_plan

            plot_module_plan(plan, details, arguments.plot)
    if arguments.out is not None:
        plan.save(arguments.out)
    if arguments.json:
        print(json.dumps({"plan": asdict(plan), "details": asdict(details)}, indent=2))
    else:
        from revzoo.display.console import print_renderable
        from revzoo.display.tables.module_plan import tabulate_module_plan

        print_renderable(tabulate_module_plan(plan, details))
        if arguments.out is not None:
            print(f"{arguments.out}: give it to the module with revzoo.ModulePlan.load({str(arguments.out)!r}).apply(module).")
    return 0


def _list_given(arguments: argparse.Namespace, options: Iterable[str]) -> list[str]:
    """Return those of the options that have another value than by default."""
    values = {option: getattr(arguments, option.strip("-").replace("-", "_")) for option in options}
    return [name for name, value in values.items() if not (value is None or value is False or value == _DEFAULTS.get(name))]


def _plan_batch(arguments: argparse.Namespace, model: "Model") -> "Plan":
    """Plan one batch size; print and draw the plan."""
    from revzoo.display.console import show_status

    with show_status("planning"):
        from revzoo.planning.planner import profile_and_plan

        batch, optimizer = create_batch(model, arguments.batch), create_optimizer(arguments.optimizer, model)
        profile, plan = profile_and_plan(
            model,
            batch,
            arguments.budget,
            solver=arguments.solver,
            optimizer=optimizer,
            loss=create_loss(arguments.loss, model),
            lookahead=_LOOKAHEADS[arguments.lookahead],
            estimate=arguments.estimate,
        )
    _show(arguments, model, profile, plan)
    return plan


def _require_counting(arguments: argparse.Namespace) -> None:
    """Raise InputError for options that need the model to be run, which many ranks are not."""
    if unused := _list_given(arguments, _OF_RUNNING) + ["a range of batch sizes"] * isinstance(arguments.batch, tuple):
        raise InputError(f"Many ranks are counted and not run. Received: --ranks and {join_names(unused)}. Leave one out.")
    if arguments.budget == "auto" or "%" in arguments.budget:  # of the machine that plans, which is none of the ranks
        raise InputError(
            f"The memory of a rank is not known here. Received: --budget {arguments.budget}. Give a size, such as 80GB."
        )


def _plan_ranks(arguments: argparse.Namespace, model: "Model") -> "Plan":
    """Plan for one of many ranks; print and draw the plan."""
    from revzoo.display.console import show_status
    from revzoo.planning.ranks.division import Division
    from revzoo.planning.ranks.rank_plan import plan_ranks

    with show_status("planning"):
        result, profile = plan_ranks(
            model,
            create_batch(model, arguments.batch),
            arguments.budget,
            Division(
                arguments.ranks,
                arguments.shard or "full",
                1 if arguments.nodes is None else arguments.nodes,
                arguments.offload,
            ),
            solver=arguments.solver,
            optimizer=create_optimizer(arguments.optimizer, model),
            loss=create_loss(arguments.loss, model),
            accumulate=arguments.accumulate,
        )
    _show(arguments, model, profile, result.plan, result)
    return result.plan


def _show(
    arguments: argparse.Namespace, model: "Model", profile: "Profile", plan: "Plan", ranks: "RankPlan | None" = None
) -> None:
    """Draw a plan, and print it beside other schedules, or everything as JSON."""
    from revzoo.display.console import show_status
    from revzoo.planning.comparison import evaluate_budgets, evaluate_uniform_schedules

    with show_status("planning other budgets"):
        beside, fixed_bytes = evaluate_uniform_schedules(model, profile), profile.memory.fixed_bytes
        budgets = evaluate_budgets(profile) if arguments.plot is not None or arguments.json else []
    if arguments.plot is not None:
        with show_status("drawing"):
            from revzoo.display.figures.plan import plot_plan

            plot_plan(plan, arguments.plot, budgets, beside, fixed_bytes)
    if arguments.json:
        data = {"plan": asdict(plan), "others": beside, "front": budgets, "fixed_bytes": fixed_bytes}
        if ranks is not None:
            data["ranks"] = {key: value for key, value in asdict(ranks).items() if key != "plan"}
        print(json.dumps(data, indent=2))
    else:
        from revzoo.display.console import print_renderable
        from revzoo.display.tables.plan import tabulate_plan
        from revzoo.display.tables.ranks import tabulate_ranks

        print_renderable(tabulate_plan(plan, beside))
        if ranks is not None:
            print_renderable(tabulate_ranks(ranks))


def _plan_batches(arguments: argparse.Namespace, model: "Model") -> "Plan":
    """Find the batch size with the most samples per second; print and draw its plan, and the other sizes."""
    from revzoo.display.console import show_status
    from revzoo.planning.batch import find_best_batch

    if arguments.estimate:
        raise InputError("Received: --estimate and a range of batch sizes, whose times are measured. Leave one out.")
    optimizer = create_optimizer(arguments.optimizer, model)
    with show_status("planning every batch size"):
        best = find_best_batch(
            model,
            arguments.budget,
            *arguments.batch,
            solver=arguments.solver,
            optimizer=optimizer,
            loss=create_loss(arguments.loss, model),
            lookahead=_LOOKAHEADS[arguments.lookahead],
        )
    if arguments.plot is not None:
        with show_status("drawing"):
            from revzoo.display.figures.batch import plot_schedules, plot_times
            from revzoo.display.figures.plan import plot_plan

            rows = [asdict(row) for row in best.rows]
            plot_plan(best.plan, arguments.plot)
            plot_times(rows, arguments.plot.with_stem(f"{arguments.plot.stem}-times"))
            plot_schedules(rows, best.plan.units, arguments.plot.with_stem(f"{arguments.plot.stem}-schedules"))
    if arguments.json:
        print(json.dumps(best.to_dict(), indent=2))
    else:
        from revzoo.display.console import print_renderable
        from revzoo.display.tables.batch import tabulate_batches

        print_renderable(tabulate_batches(best))
    return best.plan
