"""The schedule that every one of many ranks can keep: planned and counted for the rank with the largest shards."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
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
from revzoo.runtime.mode import MODES, Mode
from revzoo.sharding.shard import Precision

_FIRST_BUCKET, _BUCKET = 2**20, 25 * 2**20  # bytes of gradients that DDP sends together, unless it is told otherwise


@dataclass(frozen=True)
class RankPlan:
    """A plan for many ranks.

    Args:
        plan: schedule and peak of the rank with the largest shards.
        division: of the ranks.
        held: what that rank holds besides activations.
        collectives: of a training step with the plan, by kind.
        collectives_of_modes: the same with everything in one mode.
    """

    plan: Plan
    division: Division
    held: RankBytes
    collectives: Mapping[str, Collective]
    collectives_of_modes: Mapping[str, Mapping[str, Collective]]


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
    with _divide(model, batch, division, precision, mesh, accumulate) as (divided, mode):
        other_bytes += _count_beside(held, division)
        counted = count(divided, batch, loss, other_bytes, update_bytes=_count_update(held, division))
        memory = replace(counted, max_invert_run=predict_inversion_limit(model))
        profile = Profile(
            memory,
            timing=None,
            setting=setting or read_setting(model, batch),
            model_bytes=count_model_bytes(model),
            other_bytes=other_bytes,
            notes=(f"Counted for the first of {division}: nothing was run. Costs are FLOPs and bytes.",),
            update_bytes=_count_update(held, division),
        )
        try:
            plan = enforce_budget(divided, batch, profile, solve(profile, budget, solver), loss)
        except BudgetError as error:
            raise BudgetError(f"{error} {_name_remedy(division)}") from error
        steps = [_count_all_reduces(model, division)] * len(MODES) if mode is None else mode.steps  # DDP's are the same in all
    return RankPlan(plan, division, held, steps[-1], dict(zip(MODES, steps, strict=False))), profile


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
    other_bytes += _count_beside(held, division)
    with _divide(model, batch, division, precision, mesh, accumulate) as (divided, _):
        return count_peak(divided, batch, modes, loss, other_bytes, update_bytes=_count_update(held, division))


def _count_beside(held: RankBytes, division: Division) -> int:
    """Return what a rank holds besides the tensors of its training step: the optimizer's state, and DDP's buckets.

    Shards on the host are among those tensors, and are taken off.
    """
    if division.offload:
        return -held.weights
    return held.optimizer.state + (held.gradients if division.shard == "none" and division.ranks > 1 else 0)


def _count_update(held: RankBytes, division: Division) -> int:
    return 0 if division.offload else held.optimizer.update


@contextmanager
def _divide(
    model: Network, batch: Any, division: Division, precision: Precision, mesh: DeviceMesh | None, accumulate: bool
) -> Iterator[tuple[Network, RankMode | None]]:
    """Yield what a rank trains, and what notes its collectives; None where nothing is divided."""
    divided = divide_copy(model, division, precision=precision, mesh=mesh)
    adds_up = accumulate and not (division.offload and division.copies == 1)  # what nodes will exchange stays on the device
    with (
        nullcontext((model, None)) if division.shard == "none" else divided as (trained, mode),
        accumulated_gradients(trained) if adds_up else nullcontext(),
    ):
        yield trained, mode


def _count_all_reduces(model: nn.Module, division: Division) -> dict[str, Collective]:
    """Return what DDP sends in a training step: every gradient once, in buckets."""
    sizes = [p.nbytes for p in model.parameters() if p.requires_grad][::-1]  # backward begins with the last
    if division.ranks == 1:
        return {}
    buckets, waiting, limit = 0, 0, _FIRST_BUCKET
    for size in sizes:
        waiting += size
        if waiting >= limit:
            buckets, waiting, limit = buckets + 1, 0, _BUCKET
    return {"all-reduce": Collective(buckets + bool(waiting), 2 * (division.ranks - 1) * sum(sizes) // division.ranks)}


def _name_remedy(division: Division) -> str:
    if division.shard == "none":
        return "With shard=full the ranks divide weights, gradients and the optimizer's state."
    return "More ranks divide weights, gradients and the optimizer's state into smaller shards; activations stay."
