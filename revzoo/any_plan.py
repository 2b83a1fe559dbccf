"""`revzoo.plan`: a schedule for a model of the zoo or a chain, a plan of its graph for any other module."""

from contextlib import nullcontext
from typing import Any, Literal

import torch
from torch import nn

from revzoo.analysis.chains import find_block_chains
from revzoo.analysis.dry_run import LossFunction, accumulated_gradients, require_module
from revzoo.errors import InputError
from revzoo.graph import ModulePlan, plan_module
from revzoo.planning.plan import Plan
from revzoo.planning.planner import profile_and_plan
from revzoo.planning.profiling.hooks import PlannableModel
from revzoo.planning.solvers import Solver
from revzoo.runtime.lookahead import LookaheadOption


def plan(
    model: nn.Module,
    batch: Any,
    budget: str | int,
    *,
    solver: Solver = "timeline",
    optimizer: torch.optim.Optimizer | None = None,
    loss: LossFunction | None = None,
    lookahead: LookaheadOption = 0,
    tiles: Literal["auto"] | None = None,
    accumulate: bool = False,
    profile: bool = False,
    compiled: bool | None = None,
) -> Plan | ModulePlan:
    """Return the fastest plan whose peak is within the budget; its training step is counted before the peak is promised.

    A model of the zoo, a chain or a network that `reversible_` changed gets a schedule of its steps and nodes. Any other module
    gets a plan of its captured graph: which results to keep, and what to run again together.

    Args:
        model: any module, in the state in which it will be trained.
        batch: a tensor, a tuple or list of positional arguments, or a mapping of keyword arguments.
        budget: limit for the peak of all memory together, as for `revzoo.solve`.
        solver: "timeline" or "knapsack", as for `revzoo.solve`. "timeline" for any other module.
        optimizer: its state is part of every peak, and its update may be the peak.
        loss: computes the loss from what the model returns; None is a sum, which keeps nothing for backward.
        lookahead: how many steps are recovered ahead of backward, 0 or 1. With 1 the plan is the fastest one without it that
            leaves enough of the budget for it. 0 for networks that `reversible_` changed and for any other module.
        tiles: "auto": the faster of two plans is returned, that of whole steps and that of steps in tiles, as many as
            `revzoo.choose_tiles` finds where least is kept; what is stored stays whole, where that fits. None: the model's. The
            plan sets them. "auto" goes with solver="timeline" and lookahead=0, not with any other module.
        accumulate: whether steps begin with the gradients of earlier batches, as they do with gradient accumulation. Not for
            any other module.
        profile: for any other module: run its calls a few times on its device, and choose by their times instead of FLOPs and
            moved bytes. Models of the zoo and chains are always timed where they can be run.
        compiled: for any other module: the budget is for the module under torch.compile. It is compiled and a step is measured,
            three times at most, and it is planned with what was found. None: where it is compiled.
    Raises:
        InputError: a model, batch, optimizer, budget, lookahead or tiles that cannot be used.
        BudgetError: no schedule fits; names the smallest budget that would.
        RecoveryError: a step does not return the same output when it runs again.
    """
    require_module(model)
    if isinstance(model, PlannableModel) or find_block_chains(model):
        if compiled:
            raise InputError(
                f"compiled=True is for modules that are no model of the zoo, chain or reversible network. Received: "
                f"{type(model).__name__}. Plan without it, then torch.compile(model)."
            )
        with accumulated_gradients(model) if accumulate else nullcontext():
            return profile_and_plan(
                model, batch, budget, solver=solver, optimizer=optimizer, loss=loss, lookahead=lookahead, tiles=tiles
            )[1]
    if accumulate:
        raise InputError(
            f"Accumulated gradients are counted for models of the zoo and chains. Received: {type(model).__name__}. Plan "
            "without accumulate, with a budget that is smaller by the bytes of its gradients."
        )
    if solver != "timeline" or lookahead != 0 or tiles is not None:
        raise InputError(
            f"{type(model).__name__} is no model of the zoo and no chain: planned with solver='timeline', lookahead=0 and "
            f"tiles=None. Received: solver={solver!r}, lookahead={lookahead!r}, tiles={tiles!r}."
        )
    return plan_module(model, batch, budget, optimizer=optimizer, loss=loss, profile=profile, compiled=compiled)[0]
