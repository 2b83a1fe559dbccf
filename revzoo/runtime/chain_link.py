"""One link of a chain in forward: a step or bijection takes the pair of states one on, and leaves what backward needs.

`run_chain` runs the links of a chain in a loop. The blocks of a network that is reversible in place are links, too, which the
network's own code calls one by one (`in_place/chain.py`).
"""

from typing import Any, cast

import torch
from torch import Tensor, nn

from revzoo.bijection import Bijection
from revzoo.errors import InputError, RecoveryError
from revzoo.runtime.coupling import Pair
from revzoo.runtime.drift import Drift
from revzoo.runtime.exact import Grid
from revzoo.runtime.layer_rules import find_layers
from revzoo.runtime.layerwise import LayerwiseCall
from revzoo.runtime.lookahead import Lookahead
from revzoo.runtime.observation import begin_call, end_call
from revzoo.runtime.pair_update import PairUpdate, Step
from revzoo.runtime.recorded_call import RecordedCall, Recoverer
from revzoo.runtime.settings import Settings
from revzoo.runtime.tape import InvertedSegment, SavedInputs
from revzoo.sharded import is_sharded


def run_link(
    link: Step | Bijection,
    pair: Pair,
    segment: InvertedSegment | None,
    settings: Settings,
    grid: Grid | None,
    *,
    side: Any = None,
    lookahead: Lookahead | None = None,
    drift: Drift | None = None,
) -> tuple[Pair, InvertedSegment | None]:
    """Run one link and record what backward needs to rebuild the tensors that are dropped.

    Args:
        link: the step or bijection.
        pair: the states in front of it.
        segment: the inverted steps in front of it; None if there are none that it could go on with.
        settings: the settings of PyTorch under which a step is called.
        grid: of the states, None in floating point.
        side: read-only second argument of a step.
        lookahead: recovers steps ahead of backward.
        drift: measures what rounding loses.
    Returns:
        The states behind it, and the inverted steps that end there, if any.
    """
    update, segment = begin_link(link, pair, segment, grid)
    call, out = None, None
    if isinstance(link, Step):
        if link.mode != "store":
            call = record_step(link, settings, side, grid, watched=link.mode != "invert" or not update.will_invert)
        out = call_step(link, pair, side, call, segment or SavedInputs(pair[1:]), lookahead)
    following = end_link(link, update, pair, out, segment, call, grid)
    if drift is not None and call is not None and segment is not None:
        with torch.no_grad():
            drift.add(pair[0], update.invert(following, out)[0])
    return following, segment


def begin_link(
    link: Step | Bijection, pair: Pair, segment: InvertedSegment | None, grid: Grid | None
) -> tuple[PairUpdate, InvertedSegment | None]:
    """Return how a link updates the pair, and the inverted steps that it is the next of, if it is inverted or a bijection."""
    # A bijection before the first inverted step is never undone, so its update keeps nothing.
    update = PairUpdate(link, grid, will_invert=segment is not None)
    if isinstance(link, Step):
        if link.mode != "invert" and segment is not None:
            segment.end(pair)
            segment = None
        elif link.mode == "invert" and segment is None:
            segment = InvertedSegment(exact=grid is not None)
    return update, segment


def end_link(
    link: Step | Bijection,
    update: PairUpdate,
    pair: Pair,
    out: Tensor | None,
    segment: InvertedSegment | None,
    call: RecordedCall | None,
    grid: Grid | None,
) -> Pair:
    """Return the states behind a link, whose step has returned `out`."""
    following = update.advance(pair, out)
    if segment is not None:
        segment.append(update, call, pair)
    watch_range(grid, following, link)
    return following


def record_step(step: Step, settings: Settings, side: Any, grid: Grid | None, watched: bool) -> RecordedCall:
    """Return the call of a step that is about to be run for the first time."""
    # On a grid every bit is rebuilt, which the inverses of layers do not do.
    layers = find_layers(step.f) if step.mode == "invert" and side is None and grid is None else None
    if layers is not None:
        return LayerwiseCall(cast(nn.Module, step.f), step.name, settings, layers, watched)
    return RecordedCall(step.f, step.name, settings, side, selective=step.mode == "selective", watched=watched)


def watch_range(grid: Grid | None, pair: Pair, link: Step | Bijection) -> None:
    """Raise RecoveryError if the newer state has left the grid, or is NaN."""
    if grid is not None:
        grid.watch(pair[1], f"after {link.name if isinstance(link, Step) else type(link).__name__}")


def call_step(
    step: Step,
    pair: Pair,
    side: Any,
    call: RecordedCall | None = None,
    recoverer: Recoverer | None = None,
    lookahead: Lookahead | None = None,
) -> Tensor:
    """Return f(w[k]), recorded by `call` if there is one, after checking that it fits the stream it is added to."""
    unversioned = torch.compiler.is_compiling() or pair[1].is_inference()
    version = None if unversioned else pair[1]._version
    begin_call(step.f, pair[1:], pair)
    try:
        if call is not None and recoverer is not None:
            out = call.first_run(recoverer, pair[1], lookahead=lookahead)
        else:
            out = step.f(pair[1]) if side is None else step.f(pair[1], side)
    except RuntimeError as error:
        if "DTensor" in str(error) and isinstance(step.f, nn.Module) and is_sharded(*step.f.parameters()):
            raise RecoveryError(
                f"{step.name} has sharded parameters that are not gathered: the chain calls each step itself, so shard every "
                "step (for step in model.steps: fully_shard(step)) or the whole model, not the blocks between."
            ) from error
        raise
    end_call(step.f, out)
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
