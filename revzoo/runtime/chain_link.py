"""One link of a chain in forward: a step or bijection advances the pair of states, and records what backward needs.

`run_chain` runs the links of a chain in a loop. The blocks of a network that is reversible in place are links, too, which the
network's own code calls one by one (`block_steps/block_chain.py`).
"""

from typing import Any, cast

import torch
from torch import Tensor, nn

from revzoo.bijection import Bijection
from revzoo.device import is_sharded
from revzoo.errors import InputError, RecoveryError
from revzoo.runtime import seams
from revzoo.runtime.compiling import call_as_around
from revzoo.runtime.coupling import Pair
from revzoo.runtime.forward import Forward
from revzoo.runtime.inventory import take_inventory
from revzoo.runtime.observation import begin_call, end_call
from revzoo.runtime.recorded_call import RecordedCall
from revzoo.runtime.refill_hooks import Recoverer
from revzoo.runtime.segment import InvertedSegment, KeptStates, SavedInputs
from revzoo.runtime.tiles import MARK
from revzoo.runtime.update import BijectionUpdate, Step, StepUpdate


def run_link(
    link: Step | Bijection, pair: Pair, segment: InvertedSegment | None, forward: Forward
) -> tuple[Pair, InvertedSegment | None]:
    """Run one link and record what backward needs to rebuild the tensors that are dropped.

    Args:
        link: the step or bijection.
        pair: the states before it.
        segment: the inverted steps before it, which it may go on with; None if there are none.
        forward: what it shares with the other links.
    Returns:
        The states after it, and the inverted steps that end there, if any.
    """
    if isinstance(link, Bijection):
        for state in pair:
            # One before the first inverted step is never undone, so its update keeps nothing.
            bijection = BijectionUpdate(link, None if segment is None else state)
            if segment is not None:
                segment.append(bijection, None, pair)
            pair = cast(Pair, bijection.advance(pair, None))
        return pair, segment
    if not link.mode.inverts and segment is not None:
        segment.end(pair)
        segment = None
    grid, call, recoverer = forward.grid, None, None
    # The first step of a segment is run again, but never undone: nobody asks for the state before it.
    will_be_undone = segment is not None
    if link.mode.inverts and segment is None:
        segment = InvertedSegment(grid is not None, forward.round)
    coupling = link.coupling.bind(pair)
    if grid is not None and coupling is not link.coupling and coupling.sign is None:
        raise InputError(f"{link.name} has coefficients for each example, which exact arithmetic cannot undo. Use exact=False.")
    if MARK in vars(link.f) and link.tiles is not None:  # most are not marked, which is seen without a call
        following = seams.run_tiles(link, coupling, pair, segment, forward, will_be_undone)
    else:
        update = StepUpdate(coupling, grid, pair[0], will_be_undone)
        if link.mode.drops:
            call = record_step(link, forward, watched=not will_be_undone)
            recoverer = segment if segment is not None else SavedInputs(KeptStates(pair[1:]), forward.round)
        begin_call(link.f, pair[1:], pair)
        out = call_once(link, pair, forward.side, call, recoverer)
        end_call(link.f, out)
        following = update.advance(pair, out)
        if segment is not None:
            segment.append(update, call, pair)
        del out  # before anything else is computed
    if grid is not None:
        watch_range(grid, following, link)
    return following, segment


def record_step(step: Step, forward: Forward, watched: bool) -> RecordedCall:
    """Return the call of a step that is about to be run for the first time.

    Args:
        step: the step.
        forward: what it shares with others.
        watched: whether the last tensors that autograd saves in it are read whole. Needed where no later state is compared.
    """
    # On a grid every bit is rebuilt, which the inverses of layers do not do.
    f, inventory = step.f, take_inventory(step.f)
    if inventory.has_layers and step.mode.inverts and forward.side is None and forward.grid is None:
        call = seams.record_layerwise(step, forward, watched)
        if call is not None:
            return cast(RecordedCall, call)
    return RecordedCall(f, step.name, forward, selective=step.mode.is_selective, watched=watched, inventory=inventory)


def watch_range(grid: Any, pair: Pair, link: Step | Bijection) -> None:
    """Raise RecoveryError if the newer state has left the grid, or is NaN."""
    grid.watch(pair[1], f"after {link.name if isinstance(link, Step) else type(link).__name__}")


def call_step(step: Step, pair: Pair, side: Any) -> Tensor:
    """Return f(w[k]), after checking that it fits the stream it is added to."""
    begin_call(step.f, pair[1:], pair)
    out = call_once(step, pair, side)
    end_call(step.f, out)
    return out


def call_once(
    step: Step, pair: Pair, side: Any, call: RecordedCall | None = None, recoverer: Recoverer | None = None
) -> Tensor:
    """Return f of the states, or of a tile of them, recorded by `call` if there is one; no observer is told."""
    # Nothing is compiled where a call is recorded.
    unversioned = (call is None and torch.compiler.is_compiling()) or pair[1].is_inference()
    version = None if unversioned else pair[1]._version
    try:
        if call is not None and recoverer is not None:
            out = call.first_run(recoverer, pair[1])
        else:
            out = call_as_around(step.f, pair[1]) if side is None else call_as_around(step.f, pair[1], side)
    except RuntimeError as error:
        if "DTensor" in str(error) and isinstance(step.f, nn.Module) and is_sharded(*step.f.parameters()):
            raise RecoveryError(
                f"{step.name} has sharded parameters that are not gathered: the chain calls each step itself, so shard every "
                "step (for step in model.steps: fully_shard(step)) or the whole model, not the blocks between."
            ) from error
        raise
    if version is not None and pair[1]._version != version:
        raise InputError(
            f"{step.name} changes its input in place, and with it the stream. Replace the in-place operation at its "
            "beginning, for example ReLU(inplace=True), by one that returns a new tensor."
        )
    if not isinstance(out, Tensor) or out.shape != pair[0].shape:
        received = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
        raise InputError(
            f"{step.name} must return a tensor shaped like the stream it is added to, {tuple(pair[0].shape)}. "
            f"Received: {received}."
        )
    if out.is_complex():
        raise InputError(
            f"{step.name} must return a real tensor, like the stream it is added to. Received: {out.dtype}. Return its real "
            "part, or a real tensor of both parts (torch.view_as_real)."
        )
    return out
