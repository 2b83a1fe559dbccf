"""Following one training step: a log of the memory that appears and is freed, with marks where each unit begins.

The states, the tensors that pass from unit to unit, are listed apart because more than one unit may keep them: the input of a
stored step is also the output of the step before it, and one of the pair that a run of inverted steps ends with.
`count.py` reads the logs.
"""

from collections.abc import Iterator, Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn

from revzoo.analysis.autocast import leave_autocast
from revzoo.analysis.dry_run import LossFunction, call, compute_loss
from revzoo.analysis.flops import FlopCounter
from revzoo.block_steps.block_chain import BlockStep
from revzoo.errors import InputError
from revzoo.planning.profiling.hooks import StepHooks, assign_schedule, list_units
from revzoo.runtime.chain import ReversibleChain
from revzoo.runtime.layer_chain import LayerChain
from revzoo.runtime.layout import LayoutEntry
from revzoo.runtime.live_bytes import LiveBytes, Storages
from revzoo.runtime.lookahead import LookaheadOption
from revzoo.runtime.mode import Mode
from revzoo.runtime.observation import observe_inversions

_SNAPSHOT_EVERY = 2048  # positions: fewer take more memory, more take longer

_ORDER = (
    "A plan is for a forward that calls all blocks once, in their order. Set the modes by hand: chain.schedule, for each chain "
    "in the report of reversible_."
)

PhaseName = Literal["forward", "loss", "backward", "end"]


@dataclass(frozen=True)
class Mark:
    """The beginning of a phase of the training step.

    Args:
        phase: "forward" or "backward" of a unit, "loss", or "end" of the training step.
        unit: index of the unit; the number of units for "loss" and "end".
        position: length of the log at this time.
        flops: counted from the beginning of the training step until now.
    """

    phase: PhaseName
    unit: int
    position: int
    flops: int


@dataclass
class Trace:
    """One training step.

    Args:
        modes: of the units.
        log: of `LiveBytes`: (storage, change of its bytes) for every allocation and release, in order.
        marks: the phases in order.
        inputs: storages of what each unit is given.
        pairs: storages of the states before each unit, and at the end those after the last.
        saved: storages of what autograd saved in each unit that stores.
        fixed: storages that exist from the beginning.
        loss_end: length of the log when the loss has been computed.
        backward_start: length of the log between forward and backward, when the casts of autocast have been freed.
    """

    modes: list[Mode]
    log: list[tuple[int, int]] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    inputs: list[Storages] = field(default_factory=list)
    pairs: list[Storages] = field(default_factory=list)
    saved: list[Storages] = field(default_factory=list)
    fixed: Storages = frozenset()
    loss_end: int = 0
    backward_start: int = 0
    _snapshots: list[dict[int, int]] = field(default_factory=list, repr=False)  # what is alive, at regular positions

    def phases(self, phase: str) -> Iterator[tuple[int, int, int, int]]:
        """Yield unit, first and last position in the log, and FLOPs of all "forward" or all "backward" phases."""
        for mark, following in pairwise(self.marks):
            if mark.phase == phase:
                yield mark.unit, mark.position, following.position, following.flops - mark.flops

    def alive(self, position: int) -> dict[int, int]:
        """Return the storages alive at a position of the log, and their bytes."""
        at = position // _SNAPSHOT_EVERY
        while len(self._snapshots) <= at:
            start = len(self._snapshots) * _SNAPSHOT_EVERY
            self._snapshots.append(self._follow(self._snapshots[-1] if start else {}, start - _SNAPSHOT_EVERY, start))
        return self._follow(self._snapshots[at], at * _SNAPSHOT_EVERY, position)

    def _follow(self, alive: dict[int, int], start: int, end: int) -> dict[int, int]:
        """Return the storages alive at a position of the log, given those at an earlier one."""
        sizes = dict(alive)
        for storage, change in self.log[max(start, 0) : end]:
            size = sizes.pop(storage, 0) + change
            if size:
                sizes[storage] = size
        return sizes

    def peak(self, span: Sequence[int], without: Set[int]) -> int:
        """Return the peak between two positions of the log, of all storages other than `without`."""
        start, end = span
        total = highest = sum(size for storage, size in self.alive(start).items() if storage not in without)
        for storage, change in self.log[start:end]:
            if storage not in without:
                total += change
                highest = max(highest, total)
        return highest

    def number_states(self, stored: "Trace | None" = None) -> dict[int, int]:
        """Return a number for the storage of every state, in the order in which the states appear.

        Args:
            stored: the trace that gives the numbers; None is this one. Where layers are inverted on halves of the channels,
                both halves have the number of the one state that is there when everything is stored.
        """
        order, numbers = dict[int, int](), dict[int, int]()
        for pair, reference in zip(self.pairs, (stored or self).pairs, strict=True):
            first = len(order)
            for storage in sorted(reference):
                order.setdefault(storage, len(order))
            new = [order[storage] for storage in sorted(reference) if order[storage] >= first]
            for i, storage in enumerate(sorted(pair - numbers.keys())):
                if new:
                    numbers[storage] = new[min(i, len(new) - 1)]
        return numbers


def trace(
    model: nn.Module, batch: Any, modes: Sequence[Mode], loss: LossFunction | None = None, lookahead: LookaheadOption = 0
) -> Trace:
    """Run a training step of an isolated model with this schedule, and return what happened in it.

    Args:
        model: inside the context of `isolated`.
        batch: as `isolated` yielded it.
        modes: one per unit.
        loss: computes the loss from what the model returns; None is a sum, which keeps nothing for backward.
        lookahead: how many units are recovered ahead of backward.
    """
    assign_schedule(model, modes, lookahead)
    traced, flops, live = Trace([Mode(mode) for mode in modes]), FlopCounter(), LiveBytes()
    recorder = _Recorder(traced, flops, live, list_units(model))
    with flops, live, StepHooks(model, recorder) as hooks, observe_inversions(recorder.note_inversion), recorder.saving:
        fixed = live.watch([*model.parameters(), *model.buffers()]) | live.watch(batch)
        hooks.enter_forward()
        outputs = call(model, batch)
        hooks.end_forward(outputs)
        recorder.require_all_called()
        after = live.watch(outputs) if isinstance(model, ReversibleChain | LayerChain) else frozenset()
        recorder.mark("loss", len(modes))
        total = compute_loss(loss, outputs)
        del outputs
        traced.loss_end = live.now()
        with leave_autocast():
            traced.backward_start = live.now()
            hooks.enter_backward()
            total.backward()
        recorder.mark("end", len(modes))
    traced.log = live.log
    traced.fixed = fixed | traced.alive(traced.marks[0].position).keys()  # a mask, for example
    traced.inputs = [given - traced.fixed for given in traced.inputs]
    traced.pairs = [pair - traced.fixed for pair in (*traced.pairs, after)]
    return traced


class _Recorder:
    """The listener that fills a trace."""

    def __init__(self, traced: Trace, flops: FlopCounter, live: LiveBytes, units: Sequence[LayoutEntry]):
        self._trace, self._flops, self._live, self._units = traced, flops, live, units
        self._owners = {id(module): unit for unit, entry in enumerate(units) for module in entry.module.modules()}
        self.saving = ExitStack()

    def mark(self, phase: PhaseName, unit: int) -> None:
        flops = self._flops.forward + self._flops.backward
        self._trace.marks.append(Mark(phase, unit, self._live.now(), flops))

    def note_inversion(self, module: nn.Module) -> None:
        """Begin a unit's backward only when the unit after it has been undone, which belongs to the backward of that one."""
        unit, mark = self._owners.get(id(module)), self._trace.marks[-1]
        if unit is not None and mark.phase == "backward" and unit > mark.unit:
            del self._trace.marks[-1]
            self.mark("backward", mark.unit)

    def begin_forward(self, unit: int, inputs: Any, pair: Any) -> None:
        self._require_place(unit, pair)
        self._trace.inputs.append(inputs)
        self._trace.pairs.append(pair)
        self._trace.saved.append(frozenset())
        self.mark("forward", unit)
        # In the other modes the runtime has saved-tensor hooks of its own, and the rest of a network may have some.
        if not self._trace.modes[unit].drops and self._units[unit].can_drop:
            self.saving.enter_context(torch.autograd.graph.saved_tensors_hooks(self._note_saved, _unpack))

    def end_forward(self, unit: int) -> None:
        self.saving.close()

    def require_all_called(self) -> None:
        """Raise InputError if the forward is over before all units have been called."""
        if missed := self._units[len(self._trace.inputs) :]:
            step = missed[0].module
            if isinstance(step, BlockStep) and step.is_ordinary:
                raise InputError(
                    f"With random signs, blocks in evaluation are ordinary and have no modes. Received: {missed[0].name} in "
                    "eval mode. Plan what you train: model.train()."
                )
            raise InputError(f"{missed[0].name} is not called with this batch. {_ORDER}")

    def _require_place(self, unit: int, pair: Storages) -> None:
        """Raise InputError if a unit is called out of order, or a block on another state than the one before it returned."""
        expected = len(self._trace.inputs)
        if unit != expected:
            when = "a second time" if unit < expected else f"before {self._units[expected].name}"
            raise InputError(f"{self._units[unit].name} is called {when}. {_ORDER}")
        before, entry = self._units[max(unit - 1, 0)], self._units[unit]
        are_blocks = isinstance(before.module, BlockStep) and isinstance(entry.module, BlockStep)
        if are_blocks and not pair & self._trace.inputs[-1]:
            raise InputError(
                f"The network's own code changes the state between {before.name} and {entry.name}, so each of them "
                "begins a chain of its own. Plan the ordinary network: revzoo.ordinary_(model)."
            )

    def begin_backward(self, unit: int) -> None:
        self.mark("backward", unit)

    def identify(self, tensors: Any) -> Storages:
        return self._live.watch(tensors)

    def _note_saved(self, tensor: Tensor) -> Tensor:
        self._trace.saved[-1] |= self._live.watch(tensor)
        return tensor


def _unpack(tensor: Tensor) -> Tensor:
    return tensor
