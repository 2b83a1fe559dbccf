"""Counting what every unit of a model holds and computes in a training step.

One forward and backward gives a log of every storage that appears and is freed, with marks where each unit begins. The
states, which pass from unit to unit, are known apart, because more than one unit may keep them: the input of a stored step is
also what the step in front of it made, and half of what a run of inverted steps ends with. `count.py` reads the logs.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn

from revzoo.analysis.dry_run import call, linear_loss
from revzoo.analysis.flops import FlopCounter
from revzoo.errors import InputError
from revzoo.planning.hooks import Walk
from revzoo.runtime.chain import Mode, ReversibleChain
from revzoo.runtime.live_bytes import LiveBytes, Storages

Loss = Callable[[Any], Tensor]
Phase = Literal["forward", "loss", "backward", "end"]


@dataclass(frozen=True)
class Mark:
    """Where a phase of the step begins, in the log and in the count of FLOPs."""

    phase: Phase
    unit: int
    moment: int
    flops: int


@dataclass
class Trace:
    """One training step.

    Args:
        modes: of the units.
        log: of `LiveBytes`.
        marks: the phases in order.
        inputs: storages of what each unit is given, and nothing else.
        pairs: storages of the states in front of each unit, and at the end those behind the last.
        saved: storages of what autograd saved in each unit that stores.
        fixed: storages that are there from the beginning.
        waiting: the moment between forward and backward.
    """

    modes: list[Mode]
    log: list[tuple[int, int]] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    inputs: list[Storages] = field(default_factory=list)
    pairs: list[Storages] = field(default_factory=list)
    saved: list[Storages] = field(default_factory=list)
    fixed: Storages = frozenset()
    waiting: int = 0

    def phases(self, phase: str) -> Iterator[tuple[int, int, int, int]]:
        """Yield unit, first and last moment, and FLOPs of all phases of a kind."""
        for mark, following in pairwise(self.marks):
            if mark.phase == phase:
                yield mark.unit, mark.moment, following.moment, following.flops - mark.flops

    def alive(self, at: int) -> dict[int, int]:
        """Return the storages alive at a moment and their bytes."""
        sizes: Counter[int] = Counter()
        for storage, change in self.log[:at]:
            sizes[storage] += change
        return {storage: size for storage, size in sizes.items() if size}

    def states(self) -> dict[int, int]:
        """Return a number for every state's storage: its place in the order in which they appear."""
        order = dict.fromkeys(storage for pair in self.pairs for storage in sorted(pair))
        return {storage: i for i, storage in enumerate(order)}


def trace(model: nn.Module, batch: Any, modes: Sequence[Mode], loss: Loss | None = None) -> Trace:
    """Follow a training step of a isolated model with this schedule.

    Args:
        batch: as `isolated` gave it, inside its context.
        loss: of what the model returns; None is a sum, which keeps nothing.
    """
    model.schedule = list(modes)  # type: ignore[assignment]
    found, flops, live = Trace(list(modes)), FlopCounter(), LiveBytes()
    listener = _Listener(found, flops, live)
    with flops, live, Walk(model, listener) as walk:
        fixed = live.watch([*model.parameters(), *model.buffers()]) | live.watch(batch)
        outputs = call(model, batch)
        after = live.watch(outputs) if isinstance(model, ReversibleChain) else frozenset()
        listener.mark("loss", len(modes))
        total = total_loss(loss, outputs)
        del outputs
        found.waiting = live.moment()
        walk.forward_ended()
        total.backward()
        listener.mark("end", len(modes))
    found.log = live.log
    found.fixed = fixed | found.alive(found.marks[0].moment).keys()  # a mask, for example
    found.inputs = [given - found.fixed for given in found.inputs]
    found.pairs = [pair - found.fixed for pair in (*found.pairs, after)]
    return found


def total_loss(loss: Loss | None, outputs: Any) -> Tensor:
    """Return the loss of what the model returned; without one, its sum.

    Raises:
        InputError: it is not one number that depends on a parameter.
    """
    total = (loss or linear_loss)(outputs)
    if not (isinstance(total, Tensor) and total.numel() == 1 and total.requires_grad):
        found = f"{tuple(total.shape)}, without a gradient" if isinstance(total, Tensor) else type(total).__name__
        raise InputError(f"The loss is one number that depends on what the model returns. Received: {found}.")
    return total


class _Listener:
    def __init__(self, found: Trace, flops: FlopCounter, live: LiveBytes):
        self._trace, self._flops, self._live = found, flops, live
        self._saving = ExitStack()

    def mark(self, phase: Phase, unit: int) -> None:
        done = self._flops.forward + self._flops.backward
        self._trace.marks.append(Mark(phase, unit, self._live.moment(), done))

    def forward(self, unit: int, inputs: Any, pair: Any) -> None:
        self._trace.inputs.append(inputs)
        self._trace.pairs.append(pair)
        self._trace.saved.append(frozenset())
        self.mark("forward", unit)
        if self._trace.modes[unit] == "store":  # in the other modes the runtime has hooks of its own
            self._saving.enter_context(torch.autograd.graph.saved_tensors_hooks(self._note, _same))

    def forward_ended(self, unit: int) -> None:
        self._saving.close()

    def backward(self, unit: int) -> None:
        self.mark("backward", unit)

    def identify(self, tensors: Any) -> Storages:
        return self._live.watch(tensors)

    def _note(self, tensor: Tensor) -> Tensor:
        self._trace.saved[-1] |= self._live.watch(tensor)
        return tensor


def _same(tensor: Tensor) -> Tensor:
    return tensor
