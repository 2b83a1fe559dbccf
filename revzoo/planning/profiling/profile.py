"""The profile of a model: the bytes and costs of every unit in every mode, from which any number of plans can be made."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from revzoo.analysis.dry_run import LossFunction, memory_errors, require_whole
from revzoo.analysis.flops import FLOPS_PER_BYTE
from revzoo.analysis.optimizer_step import count_optimizer
from revzoo.format import format_bytes
from revzoo.planning.budget import count_model_bytes, free_bytes, parse_budget
from revzoo.planning.profiling.count import count
from revzoo.planning.profiling.inversion_limit import measure_inversion_limit, predict_inversion_limit
from revzoo.planning.profiling.timing import Timing, measure_timing, measure_workspace, price_by_time
from revzoo.planning.setting import Setting, read_setting
from revzoo.planning.solvers.problem import Problem, reprice
from revzoo.planning.solvers.schedule_totals import cost, peak
from revzoo.planning.solvers.timeline import minimize_peak
from revzoo.runtime.mode import Mode

# What a device computes in float32 while it moves a byte: about 14 on an H200 (67 TFLOP/s, 4.8 TB/s).


@dataclass(frozen=True)
class Profile:
    """What every unit of a model keeps, needs and costs in every mode, for one batch on one device.

    Args:
        memory: counted bytes, exact, and the extra FLOPs of every mode.
        timing: measured seconds; None where nothing was run.
        setting: what the profile holds for.
        model_bytes: weights and buffers, which are on the device already.
        other_bytes: optimizer state, and whatever else was given as alive during the whole training step.
        notes: remarks for the reader, such as why nothing was run.
        update_bytes: what the optimizer's update takes, besides gradients and all of the above.
        workspace_bytes: of a CUDA device's kernels, at the smallest peak, or with everything stored. They are part of the
            problem's fixed bytes.
    """

    memory: Problem
    timing: Timing | None
    setting: Setting
    model_bytes: int
    other_bytes: int = 0
    notes: tuple[str, ...] = ()
    update_bytes: int = 0
    workspace_bytes: int = 0

    @property
    def problem(self) -> Problem:
        """What the solvers get: costs are nanoseconds if they were measured, else FLOPs plus moved bytes weighted as FLOPs."""
        return price_by_work(self.memory) if self.timing is None else price_by_time(self.memory, self.timing)

    def predict_seconds(self, modes: Sequence[str]) -> float | None:
        """Return the seconds of a forward and backward with a schedule; None where nothing was timed."""
        return None if self.timing is None else self.timing.step_seconds + cost(self.problem, modes) / 1e9


def profile(
    model: nn.Module,
    batch: Any,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    loss: LossFunction | None = None,
    run: bool = True,
    other_bytes: int = 0,
    budget: str | int | None = None,
) -> Profile:
    """Count the bytes and FLOPs of every unit in every mode, check how many steps can be inverted, and measure seconds.

    Bytes are counted under `FakeTensorMode` (small steps on a CPU are run), so a batch that does not fit can be profiled.
    Seconds are medians over training steps with mixed modes on the model's device; units that do the same work share
    their samples. On a CPU they are those of the calling thread. The model is left as it was.

    Args:
        model: a `revzoo.Model`, a `ReversibleChain`, a `LayerChain`, or a network that `reversible_` changed, in the state in
            which it will be trained. On the meta device only bytes and FLOPs are counted.
        batch: a tensor, a tuple or list of positional arguments, or a mapping of keyword arguments.
        optimizer: its state is part of every peak, at full size even before the first optimizer step. Its update is counted.
        loss: computes the loss from what the model returns; None is a sum, which keeps nothing for backward.
        run: False measures no seconds. Whether steps can be inverted is still checked, on a few examples.
        other_bytes: other memory that is alive during the whole training step, such as averaged weights.
        budget: no training step that takes more is timed, as for `revzoo.solve`; None is what is free. Where everything can be
            stored within it, there is nothing to decide, and nothing is timed.
    Raises:
        InputError: not such a model, or one that processes divide; an unusable batch, no parameter with a gradient, an
            optimizer of other parameters, or no such budget.
        RecoveryError: a step does not return the same output when it runs again.
    """
    require_whole(model)
    taken = count_optimizer(model, optimizer)
    other_bytes += taken.state
    counted = count(model, batch, loss, other_bytes, update_bytes=taken.update)
    memory = replace(counted, max_invert_run=predict_inversion_limit(model))
    notes, timing, workspace = list[str](), None, 0
    limit = None if budget is None else parse_budget(budget, next(model.parameters()).device, count_model_bytes(model))
    left = -1 if limit is None else limit - peak(memory, memory.all_stored)  # with everything stored; below 0, it does not fit
    if any(p.is_meta for p in model.parameters()):
        notes.append(
            "On the meta device nothing is run: costs are counted FLOPs and bytes, and rounding errors are not checked."
        )
    else:
        if run and left >= 0:
            workspace, notes = _measure_workspace(model, batch, memory, memory.all_stored, loss)
        if left < workspace:
            memory, timing, workspace, notes = _run(model, batch, memory, loss, limit, run=run)
        memory = replace(memory, fixed_bytes=memory.fixed_bytes + workspace)
    setting, model_bytes = read_setting(model, batch), count_model_bytes(model)
    return Profile(memory, timing, setting, model_bytes, other_bytes, tuple(notes), taken.update, workspace)


def _run(
    model: nn.Module, batch: Any, memory: Problem, loss: LossFunction | None, limit: int | None, *, run: bool
) -> tuple[Problem, Timing | None, int, list[str]]:
    """Return the problem with the runs of steps that can be inverted, seconds, the bytes of kernels' workspaces, and notes."""
    notes, timing, workspace = list[str](), None, 0
    try:
        with memory_errors():
            memory = replace(memory, max_invert_run=measure_inversion_limit(model, batch))
    except MemoryError:
        memory = replace(memory, max_invert_run=0)
        notes.append("Checking which steps can be inverted ran out of memory, so no step is inverted.")
    if memory.max_invert_run:
        notes.append(f"At most {memory.max_invert_run} steps in a row are inverted: longer runs would lose too much precision.")
    if run:
        allowance, smallest = _find_allowance(model, limit), minimize_peak(replace(memory, update_bytes=0))[1]
        workspace, more = _measure_workspace(model, batch, memory, smallest, loss)
        notes += more
        measured = replace(memory, fixed_bytes=memory.fixed_bytes + workspace)
        try:
            with memory_errors():
                timing = measure_timing(model, batch, measured, allowance, loss)
        except MemoryError:
            notes.append("No step with stored units fits the memory: costs are counted FLOPs and bytes instead of seconds.")
    return memory, timing, workspace, notes


def _measure_workspace(
    model: nn.Module, batch: Any, memory: Problem, modes: Sequence[Mode], loss: LossFunction | None
) -> tuple[int, list[str]]:
    """Return what kernels take besides what is counted, with a schedule, and notes about it."""
    problem = replace(memory, update_bytes=0)  # no update is run
    try:
        workspace = measure_workspace(model, batch, modes, peak(problem, modes) - problem.fixed_bytes, loss)
    except MemoryError:
        return 0, ["What kernels take besides what is counted is not known: no training step fits the memory."]
    if not workspace:
        return 0, []
    return workspace, [f"{format_bytes(workspace)} of every peak are workspaces of kernels on this device, as measured."]


def _find_allowance(model: nn.Module, limit: int | None) -> int:
    """Return what a training step that is timed may take: no more than the budget, nor than is free."""
    device = next(model.parameters()).device
    free = free_bytes(device) + count_model_bytes(model) if device.type in ("cpu", "cuda") else 2**62
    return free if limit is None else min(free, limit)


def price_by_work(memory: Problem) -> Problem:
    """Return the problem with a price for bytes added to the FLOPs, as FLOPs alone would make norms and activations free."""
    return reprice(memory, lambda k, variant, option: option.cost + FLOPS_PER_BYTE * option.made_bytes)
