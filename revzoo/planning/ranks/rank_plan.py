"""The schedule that every one of many ranks can keep: planned and counted for the rank with the largest shards."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from revzoo.analysis.dry_run import LossFunction, accumulated_gradients, require_module
from revzoo.errors import BudgetError, InputError
from revzoo.model.network import Network
from revzoo.planning.budget import count_model_bytes
from revzoo.planning.plan import Plan
from revzoo.planning.planner import enforce_budget, solve
from revzoo.planning.profiling.count import count, count_peak
from revzoo.planning.profiling.inversion_limit import predict_inversion_limit
from revzoo.planning.profiling.profile import Profile
from revzoo.planning.ranks.division import Division, RankBytes, count_rank_bytes
from revzoo.planning.ranks.rank_copy import Collective, RankMode, divide_copy
from revzoo.planning.setting import Setting, read_setting
from revzoo.planning.solvers import Solver
from revzoo.runtime.mode import Mode
from revzoo.sharding.shard import Precision


@dataclass(frozen=True)
class RankPlan:
    """A plan for many ranks.

    Args:
        plan: schedule and peak of the rank with the largest shards.
        division: of the ranks.
        held: what that rank holds besides activations.
        collectives: of a training step with the plan, by kind.
    """

    plan: Plan
    division: Division
    held: RankBytes
    collectives: Mapping[str, Collective]


def plan_ranks(
    model: Network,
    batch: Any,
    budget: str | int,
    division: Division,
    *,
    solver: Solver = "timeline",
    optimizer: Optimizer | None = None,
    loss: LossFunction | None = None,
    other_bytes: int = 0,
    precision: Precision = "no",
    accumulate: bool = False,
    mesh: DeviceMesh | None = None,
    setting: Setting | None = None,
) -> tuple[RankPlan, Profile]:
    """Return the plan of least work whose peak is within the budget of every rank, and the profile it was made from.

    Nothing is run, sent or allocated. Costs are counted FLOPs and bytes, and rounding errors are not checked.

    Args:
        model: not divided itself, in the state in which it will be trained; on the meta device, for example.
        batch: of one rank.
        budget: limit for the peak of one rank.
        division: over which ranks the model will be divided.
        solver, optimizer, loss: as for `revzoo.plan`; the optimizer is of the model's whole parameters.
        other_bytes: other memory that is alive on a rank during the whole training step, such as averaged weights.
        precision: of the surrounding autocast, which is that of the step.
        accumulate: whether steps begin with the gradients of earlier batches.
        mesh: of the ranks, where they have been started. Only the calling process counts, and sends nothing.
        setting: what the plan will hold for; None is the model and batch as they are now.
    Raises:
        InputError: a model, batch, optimizer or budget that cannot be used, or a process group without its mesh.
        BudgetError: no schedule fits; names the smallest budget that would.
    """
    require_module(model)
    if not isinstance(model, Network):
        raise InputError(f"Models of the zoo are planned for many ranks. Received: {type(model).__name__}.")
    held = count_rank_bytes(model, division, optimizer)
    with _divide(model, division, precision, mesh, accumulate) as (divided, mode):
        other_bytes += held.optimizer.state
        counted = count(divided, batch, loss, other_bytes, update_bytes=held.optimizer.update)
        memory = replace(counted, max_invert_run=predict_inversion_limit(model))
        profile = Profile(
            memory,
            timing=None,
            setting=setting or read_setting(model, batch),
            model_bytes=count_model_bytes(model),
            other_bytes=other_bytes,
            notes=(f"Counted for the first of {division}: nothing was run. Costs are FLOPs and bytes.",),
            update_bytes=held.optimizer.update,
        )
        try:
            plan = enforce_budget(divided, batch, profile, solve(profile, budget, solver), loss)
        except BudgetError as error:
            remedy = "More ranks divide weights, gradients and the optimizer's state into smaller shards; activations stay."
            raise BudgetError(f"{error} {remedy}") from error
    return RankPlan(plan, division, held, mode.steps[-1]), profile


def count_rank_peak(
    model: Network,
    batch: Any,
    modes: Sequence[Mode],
    division: Division,
    *,
    optimizer: Optimizer | None = None,
    loss: LossFunction | None = None,
    other_bytes: int = 0,
    precision: Precision = "no",
    accumulate: bool = False,
    mesh: DeviceMesh | None = None,
) -> int:
    """Return the peak of a training step of one rank with this schedule [bytes]. Other arguments: as for `plan_ranks`."""
    held = count_rank_bytes(model, division, optimizer)
    other_bytes += held.optimizer.state
    with _divide(model, division, precision, mesh, accumulate) as (divided, _):
        return count_peak(divided, batch, modes, loss, other_bytes, update_bytes=held.optimizer.update)


@contextmanager
def _divide(
    model: Network, division: Division, precision: Precision, mesh: DeviceMesh | None, accumulate: bool
) -> Iterator[tuple[Network, RankMode]]:
    """Yield what a rank trains, and what notes its collectives."""
    with (
        divide_copy(model, division, precision=precision, mesh=mesh) as (divided, mode),
        accumulated_gradients(divided) if accumulate else nullcontext(),
    ):
        yield divided, mode
