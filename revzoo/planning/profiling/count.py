"""Trace a training step in a few schedules, from which each unit's memory and FLOPs in every mode follow (`derivation.py`).

In four of the schedules all units have the same mode (nodes, which cannot invert, are selective where steps invert). In the
other two, inverted steps alternate with recomputed ones, because the first step of an inverted run is recovered like a
recomputed one. What an inverted layer takes also depends on its place in the run: three schedules with runs of two show that.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from torch import nn

from revzoo.analysis.chains import find_block_chains, preserve_schedules
from revzoo.analysis.dry_run import LossFunction, isolated
from revzoo.analysis.flops import FEW_FLOPS
from revzoo.device import has_value
from revzoo.errors import InputError, MissingValueError, join_names
from revzoo.planning.profiling.derivation import build_problem
from revzoo.planning.profiling.hooks import list_units, read_layout
from revzoo.planning.profiling.trace import Trace, trace
from revzoo.planning.solvers.problem import Problem
from revzoo.runtime.drift import ignore_error_growth
from revzoo.runtime.layout import LayoutEntry
from revzoo.runtime.lookahead import LookaheadOption
from revzoo.runtime.mode import MODES, Mode

_FEW_BYTES = 2**28  # small enough to allocate without asking
_ALTERNATING = ((Mode.INVERT, Mode.RECOMPUTE), (Mode.RECOMPUTE, Mode.INVERT))


def count(
    model: nn.Module, batch: Any, loss: LossFunction | None = None, other_bytes: int = 0, *, update_bytes: int = 0
) -> Problem:
    """Return the bytes and FLOPs of every unit in every mode, counted without running the model.

    Steps that are small and on a CPU are run after all: that is faster, and the bytes are the same.

    Args:
        model: a `revzoo.Model`, a `ReversibleChain`, a `LayerChain`, or a network that `reversible_` changed.
        batch: a tensor, a tuple or list of positional arguments, or a mapping of keyword arguments.
        loss: computes the loss from what the model returns; None is a sum, which keeps nothing for backward.
        other_bytes: other memory that is alive during the whole training step, such as optimizer state and averaged weights.
        update_bytes: what the optimizer's update takes besides gradients and all of the above.
    Raises:
        InputError: not a model that can be planned, compiled steps, an unusable batch, or no parameter with a gradient.
    """
    entries = list_units(model)
    if len({id(entry.module) for entry in entries}) < len(entries):
        raise InputError(
            "A module that is several steps cannot be planned: its calls cannot be told apart. Copy it for each step."
        )
    if compiled := [name or "model" for name, m in model.named_modules() if m._compiled_call_impl is not None]:
        raise InputError(
            f"What compiled code keeps cannot be counted. Received: compiled {join_names(compiled, most=3)}. Plan first, then "
            "compile the steps: the plan stays in force."
        )
    with preserve_schedules(model):
        first, *others = list_traced_schedules(entries)
        traces = [_trace_apart(model, batch, first, loss)]
        small = traces[0].marks[-1].flops <= FEW_FLOPS and _step_peak(traces[0]) <= _FEW_BYTES
        fake = not small or any(p.device.type != "cpu" for p in model.parameters())
        with ignore_error_growth():
            traces += [_trace_apart(model, batch, modes, loss, fake) for modes in others]
    problem = build_problem(read_layout(model), traces, other_bytes)
    if update_bytes:
        problem = replace(problem, update_bytes=_count_left(traces[0]) + other_bytes + update_bytes - problem.fixed_bytes)
    return problem


def list_traced_schedules(entries: Sequence[LayoutEntry]) -> Iterator[list[Mode]]:
    """Yield the schedules that are traced: six, and with layers more; the first stores everything, the fourth inverts."""
    for mode in MODES:
        yield [_choose_mode(entry, mode) for entry in entries]
    for pair in _ALTERNATING:
        yield [pair[k % 2] if entry.can_invert else Mode.STORE for k, entry in enumerate(entries)]
    if any(entry.kind == "layer" for entry in entries):
        for shift in range(3):  # runs of two
            yield [Mode.INVERT if entry.can_invert and (k + shift) % 3 else Mode.RECOMPUTE for k, entry in enumerate(entries)]


def _choose_mode(entry: LayoutEntry, mode: Mode) -> Mode:
    """Return the mode that a unit has where all have this one if they can."""
    return mode if mode in entry.modes else Mode.SELECTIVE if entry.can_drop else Mode.STORE


def count_peak(
    model: nn.Module,
    batch: Any,
    modes: Sequence[Mode],
    loss: LossFunction | None = None,
    other_bytes: int = 0,
    *,
    update_bytes: int = 0,
    lookahead: LookaheadOption = 0,
) -> int:
    """Return the peak memory of a training step with this schedule [bytes], counted without running it. Args: as `count`."""
    with preserve_schedules(model):
        traced = _trace_apart(model, batch, modes, loss, lookahead=lookahead)
        return max(_step_peak(traced), _count_left(traced) + update_bytes) + other_bytes


def _trace_apart(
    model: nn.Module,
    batch: Any,
    modes: Sequence[Mode],
    loss: LossFunction | None,
    fake: bool = True,
    lookahead: LookaheadOption = 0,
) -> Trace:
    try:
        with isolated(model, batch, fake=fake) as inputs:
            return trace(model, inputs, modes, loss, lookahead)
    except MissingValueError:
        if fake and find_block_chains(model) and all(map(has_value, model.parameters())):
            return _trace_apart(model, batch, modes, loss, False, lookahead)  # a mixture of experts, for example
        raise


def _step_peak(traced: Trace) -> int:
    return max(accumulate(change for _, change in traced.log))


def _count_left(traced: Trace) -> int:
    """Return what is alive after backward, when the optimizer makes its update."""
    return sum(change for _, change in traced.log[: traced.marks[-1].position])
