"""Stages one and two of planning: what a model may do, and what that takes on this machine."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from revzoo.analysis.memory_report import state_bytes
from revzoo.planning.anchor import growth_limit, longest_run
from revzoo.planning.budget import free_bytes
from revzoo.planning.clock import Times, estimated_times, measured_times, memory_errors, timed
from revzoo.planning.count import count
from revzoo.planning.hooks import PlannableModel
from revzoo.planning.problem import Problem, repriced
from revzoo.planning.setting import Setting, setting
from revzoo.planning.trace import Loss

# What a device computes in float32 while it moves a byte: about 14 on an H200 (67 TFLOP/s, 4.8 TB/s).
_FLOPS_PER_BYTE = 16


@dataclass(frozen=True)
class Profile:
    """What every unit of a model keeps, needs and takes in every mode, for one batch on one device.

    Args:
        counted: bytes, exact, and extra FLOPs.
        times: seconds, measured; None where nothing was run.
        setting: what it holds for.
        model_bytes: weights and buffers, which are on the device already.
        other_bytes: state of the optimizer and whatever else was said to be alive all the time.
        notes: what a reader should know, such as why nothing was run.
    """

    counted: Problem
    times: Times | None
    setting: Setting
    model_bytes: int
    other_bytes: int = 0
    notes: tuple[str, ...] = ()

    @property
    def problem(self) -> Problem:
        """What the planner solves: with nanoseconds where there are any, else with FLOPs and what moving bytes is worth."""
        return estimated(self.counted) if self.times is None else timed(self.counted, self.times)


def profile(
    model: PlannableModel,
    batch: Any,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    loss: Loss | None = None,
    run: bool = True,
    estimate: bool = False,
    other_bytes: int = 0,
) -> Profile:
    """Count the bytes and FLOPs of every unit in every mode, check what may be inverted, and measure seconds.

    Bytes are counted under `FakeTensorMode` (small steps on a CPU are run), so a batch that does not fit can be profiled.
    Seconds are medians over training steps with mixed modes on the model's device, units of one kind together. The model is
    left as it was found.

    Args:
        model: a `revzoo.Model` or a `ReversibleChain`, in the state in which it is to be trained. On the meta device only
            bytes and FLOPs are counted.
        batch: a tensor, a tuple or list of positional arguments, or a mapping of keyword arguments.
        optimizer: its state is part of every peak, foreseen if no step has been made yet.
        loss: of what the model returns; None is a sum, which keeps nothing.
        run: False measures no seconds; what may be inverted is checked all the same, with a few examples.
        estimate: run the leanest schedule alone, and take a unit's forward for what every mode adds to storing.
        other_bytes: what else is alive all the time, such as averaged weights.
    Raises:
        InputError: not such a model, an unusable batch, nothing to differentiate, or an optimizer of other parameters.
        RecoveryError: a step does not repeat itself.
    """
    other_bytes += state_bytes(model, optimizer)
    counted = replace(count(model, batch, loss, other_bytes), max_invert_run=growth_limit(model))
    notes, times = [], None
    if any(p.is_meta for p in model.parameters()):
        notes.append(
            "On the meta device nothing is run: costs are counted, FLOPs and bytes, and rounding errors are not looked at."
        )
    else:
        try:
            with memory_errors():
                counted = replace(counted, max_invert_run=longest_run(model, batch))
        except MemoryError:
            counted = replace(counted, max_invert_run=0)
            notes.append("Checking what may be inverted ran out of memory, so nothing is.")
        if counted.max_invert_run:
            notes.append(f"At most {counted.max_invert_run} steps in a row are inverted: more would round too much away.")
        if run:
            times, note = _times(model, batch, counted, loss, estimate)
            notes += note
    return Profile(counted, times, setting(model, batch), held_bytes(model), other_bytes, tuple(notes))


def _times(model: nn.Module, batch: Any, counted: Problem, loss: Loss | None, estimate: bool) -> tuple[Times | None, list[str]]:
    """Return times, the best there is memory for, and what to say about them."""
    notes = ["What a mode adds is taken to be a forward of the unit."]
    if not estimate:
        try:
            device = next(model.parameters()).device
            allowance = free_bytes(device) + held_bytes(model) if device.type in ("cpu", "cuda") else 2**62
            with memory_errors():
                return measured_times(model, batch, counted, allowance, loss), []
        except MemoryError:
            notes = ["Profiling with stored units ran out of memory, so what a mode adds is taken to be a forward of the unit."]
    try:
        with memory_errors():
            return estimated_times(model, batch, counted, loss), notes
    except MemoryError:
        return None, ["Profiling ran out of memory, so costs are counted, FLOPs and bytes, and not seconds."]


def estimated(counted: Problem) -> Problem:
    """Return the problem with the bytes made again added to the costs: FLOPs alone call norms and activations free."""
    return repriced(counted, lambda k, variant, option: option.cost + _FLOPS_PER_BYTE * option.made_bytes)


def held_bytes(model: nn.Module) -> int:
    """Return the bytes of a model's parameters and buffers."""
    return sum(t.nbytes for t in {id(t): t for t in (*model.parameters(), *model.buffers())}.values())
