"""Where the axes of the runtime attach to its core. Each axis has its file, and fills a slot here when it is imported.

The core runs steps, drops what autograd saves in them, and runs them again in backward: `chain.py`, `chain_link.py`,
`recorded_call.py`, `segment.py`, and `conditions.py` with what a second run must have as the first. It knows no more of the
axes than stands here.

    slot                filled by              asked
    begin_forward       round.py, drift.py     at the beginning of the recorded forward of a chain
    make_grid           exact.py               for exact arithmetic
    make_lookahead      lookahead_setting.py   for the setting of a chain
    record_layerwise    layerwise.py           for a step whose f is made of layers with an inverse
    keep_products       selective.py           before the first run of a call in mode `selective`
    keep_regions        kept_regions.py        before the first run of a call that has or may have regions to keep
    follower            complete_gradients.py  told which calls will run again, and which will not

A coupling is asked for its coefficients in every forward (`Coupling.bind`), and may return others for each example.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

LookaheadOption = Literal[0, 1, "auto"]


class Arithmetic(Protocol):
    """How states are advanced and inverted, if not in floating point: on a grid."""

    dtype: torch.dtype

    def round(self, x: Tensor) -> Tensor: ...

    def advance(self, coupling: Any, previous: Tensor, current: Tensor, out: Tensor, *, keeps_bits: bool = False) -> Any: ...

    def invert(
        self, coupling: Any, following: Tensor, current: Tensor, out: Tensor, kept: Any, into: Tensor | None
    ) -> Tensor: ...

    def watch(self, state: Tensor, where: str) -> None: ...


class Ahead(Protocol):
    """Recovers calls ahead of backward. What it is given are the handles that the graph holds of calls."""

    @property
    def latest(self) -> Any: ...

    def follow(self, recoverable: Any) -> None: ...

    def start(self, recoverable: Any) -> None: ...

    def finish(self, recoverable: Any) -> bool: ...

    def forget(self) -> None: ...


class Comparing(Protocol):
    """Compares the second runs of one forward with the first."""

    def watch_call(self, call: Any, x: Tensor, *, same_input: bool, reads_whole: bool) -> Any: ...

    def watch_segment(self, exact: bool) -> "StateWatch": ...

    def compare_alone(self, call: Any, inputs: Sequence[Tensor]) -> None: ...

    def note_compared(self) -> None: ...

    def send(self) -> None: ...


class StateWatch(Protocol):
    """Compares the states that the recovery of one segment rebuilds."""

    def restart(self) -> None: ...

    def note(self, call: Any, state: Tensor, is_rebuilt: bool) -> Any: ...

    def begin(self, last: Sequence[Tensor]) -> None: ...

    def compare(self, noted: Any, call: Any, update: Any, rebuilt: Tensor, refilled: bool) -> None: ...

    def compare_refilled(self, call: Any) -> None: ...

    def note_advance(self, update: Any) -> None: ...


class Keeper(Protocol):
    """Keeps something of the first run of a call for its second."""

    is_paused: bool  # during a run inside the first, which is not to be kept

    def record(self) -> AbstractContextManager[Any]:
        """Return a context for the first run."""

    def note_saved(self, slot: int, tensor: Tensor) -> None:
        """Note a tensor that autograd saves in it."""

    def hand_out(self) -> AbstractContextManager[Any]:
        """Return a context for a second run."""


begin_forward: list[Callable[..., None]] = []  # called with the forward, an input, the steps, and the segment before them
make_grid: Callable[..., Arithmetic]
make_lookahead: Callable[[Any], Any]  # called with the option
record_layerwise: Callable[..., Any]  # called with step, forward and whether it is watched; returns a call, or None
keep_products: Callable[[], Any]
keep_regions: Callable[..., Any]  # called with f, its name, the forward and the conditions; returns a keeper, or None
follower: Any = None  # has `announce` and `dismiss`, called with a call and the tensors that it runs with
