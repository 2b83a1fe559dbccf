"""Where the axes of the runtime attach to its core. Each axis has its file, and fills a slot here when it is imported.

The core runs steps, drops what autograd saves in them, and runs them again in backward: `chain.py`, `chain_link.py`,
`recorded_call.py`, `segment.py`, and `conditions.py` with what a second run must have in common with the first. This is all
that it knows of the axes:

    slot                filled by              asked
    begin_forward       round.py, drift.py     at the beginning of the recorded forward of a chain
    make_grid           exact.py               for exact arithmetic
    record_layerwise    layerwise.py           for a step whose f is made of layers with an inverse
    run_tiles           tiled_step.py          for a step that is cut into tiles
    keep_products       selective.py           before the first run of a call in mode `selective`
    keep_regions        kept_regions.py        before the first run of a call that has or may have regions to keep
    follower            complete_gradients.py  told which calls will run again, and which will not

Five have no slot. A mode is a member of `mode.py`, asked by `run_link`, `run_node` and `layer_chain.py`. A coupling is
registered in `coupling.py`, and asked in every forward for its coefficients, which may be others for each example (`bind`). A
device is a row of `settings.py`. A fingerprint is in `fingerprint.py`. Look-ahead is made for each forward by `lookahead.py`,
and follows its recorded calls.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any, Protocol

from torch import Tensor

from revzoo.runtime.compiling import is_traced


class Keeper(Protocol):
    """Keeps something of the first run of a call for its second."""

    is_paused: bool  # during a run inside the first, which is not to be kept

    def record(self) -> AbstractContextManager[Any]:
        """Return a context for the first run."""

    def note_saved(self, slot: int, tensor: Tensor) -> None:
        """Note a tensor that autograd saves in it."""

    def hand_out(self) -> AbstractContextManager[Any]:
        """Return a context for a second run."""


def prepare_compiler() -> int:
    """Have the compiler rebuild what chains drop that are traced now. Run while it traces, before their numbers are read.

    Returns: 0 if it cannot, 1 if it can in floating point, 2 if it can in exact arithmetic, too.
    """
    prepared: int = import_module("revzoo.graph.compiler").prepare_chain()  # imports the compiler, which is there by now
    return prepared


def traces_backward() -> bool:
    """Return whether the compiler is tracing, with a backend whose backward can rebuild what is dropped in floating point."""
    return is_traced() and prepare_compiler() > 0


vars(prepare_compiler)["_dynamo_marked_constant"] = True  # as torch.compiler.assume_constant_result, which imports the compiler


begin_forward: list[Callable[..., None]] = []  # called with the forward, an input, the steps, and the segment before them
make_grid: Callable[..., Any]  # called as `Grid`
record_layerwise: Callable[..., Any]  # called with step, forward and whether it is watched; returns a call, or None
run_tiles: Callable[..., Any]  # called with step, bound coupling, states, segment, forward and whether it will be undone
keep_products: Callable[[], Any]
keep_regions: Callable[..., Any]  # called with f, its name, the forward and the conditions; returns a keeper, or None
follower: Any = None  # has `announce` and `dismiss`, called with a call and the tensors that it runs with
