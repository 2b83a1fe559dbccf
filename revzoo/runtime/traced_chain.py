"""A chain under torch.compile: its forward is traced into the graph, which says how each of its states is undone.

After each step the inverse of its update is traced, too. The operator `revzoo::undo` ties it to the state, so that nothing of
it is lost, and nothing of it runs in forward: the compiler's backward is made of what `undo` is given, and `undo` is taken out
(`graph/inversion.py`). A second run of a step is then a part of the graph as well, and needs no hooks, and no comparison: it
is the same operations. In exact arithmetic, where compiled code might round otherwise than the first run, the oldest states
are compared bit by bit.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from revzoo.bijection import Bijection
from revzoo.invertible import halve, join_halves
from revzoo.runtime.chain_link import call_step
from revzoo.runtime.coupling import Pair
from revzoo.runtime.fingerprint import square_bits
from revzoo.runtime.layer_call import call_layer
from revzoo.runtime.layer_rules import Layer, expand, is_channelwise, is_coupled, starts_in_halves
from revzoo.runtime.layerwise import slice_halves
from revzoo.runtime.mode import Mode
from revzoo.runtime.transforms import warn_user
from revzoo.runtime.update import (
    AdditionUpdate,
    BijectionUpdate,
    States,
    Step,
    StepUpdate,
    Update,
    get_strides,
    restore_strides,
)

BEGIN = "begin"  # in place of a mode: where a chain begins


@torch.library.custom_op("revzoo::undo", mutates_args=())
def undo(
    after: Tensor, back: Tensor, before: Tensor, current: Tensor, is_equal: Tensor | None, kept: list[Tensor], mode: str
) -> Tensor:
    """Return a state. What else it is given says how it is undone.

    Args:
        after: the state.
        back: the state before it, computed from it, from `current` and from `kept`.
        before: the state before it, as it was in forward.
        current: the state that the step ran on.
        is_equal: whether `back` is `before` to the bit; None where it need not be.
        kept: what forward keeps for `back` and `is_equal`.
        mode: of the step.
    """
    return after.clone()


@undo.register_fake
def _(after: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(after)


def _count_kept(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.count = len(inputs[5])
    if type(output) is Tensor:  # it runs, with values
        warn_user(
            "The backend of torch.compile has no graph of backward to rebuild states in: a reversible chain in it stores "
            'everything. Take "inductor" or "aot_eager", or leave the chain uncompiled.'
        )


def _pass_gradient(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    return gradient, None, None, None, None, [None] * ctx.count, None


undo.register_autograd(_pass_gradient, setup_context=_count_kept)


def trace_chain(links: Sequence[Step | Bijection], pair: Pair, side: Any, grid: Any) -> Pair:
    """Run a chain while it is traced.

    Args:
        links: the steps and bijections.
        pair: the streams.
        side: read-only second argument of every step.
        grid: of the states; None in floating point.
    """
    pair = begin(pair[0]), begin(pair[1])
    for link in links:
        if isinstance(link, Step):
            update = StepUpdate(link.coupling.bind(pair), grid, pair[0], link.mode.inverts)
            pair = advance(update, pair, call_step(link, pair, side), link.mode, is_exact=grid is not None)
        else:
            for _ in range(2):
                pair = advance(BijectionUpdate(link, pair[0]), pair, None, Mode.INVERT)
    return pair


def trace_node(module: nn.Module, mode: Mode, *inputs: Tensor) -> Any:
    """Call a node while it is traced, in mode `recompute` or `selective`."""
    inputs = tuple([begin(x) if x.is_floating_point() else x for x in inputs])
    out = module(*inputs)
    return _undo(out, mode.value) if isinstance(out, Tensor) else tuple([_undo(each, mode.value) for each in out])


def trace_layers(layers: Sequence[Layer], x: Tensor) -> Tensor:
    """Run layers while they are traced. A `Coupled` layer is two steps on the halves of its channels.

    The halves stay apart until a layer needs them together.
    """
    layers = list(expand(layers))
    states: States = (begin(x),)
    if starts_in_halves(layers, x):
        states = trace_split(states[0], halve, join_halves)
    for layer in layers:
        module = layer.module
        if is_coupled(module) and layer.is_inverted:
            pair = states if len(states) == 2 else trace_split(states[0], halve, join_halves)
            for f in (module.f, module.g):
                pair = advance(AdditionUpdate(pair[0]), pair, f(pair[1]), Mode.INVERT)
            states = pair
        elif layer.is_inverted and len(states) == 2 and is_channelwise(module):
            halves = zip(states, slice_halves(states), strict=True)
            states = tuple([_trace_layer(module, half, channels) for half, channels in halves])
        else:
            x = _trace_join(states)
            if layer.is_inverted:
                x = _trace_layer(module, x)
            else:
                x = trace_node(module, layer.mode, x) if layer.mode.drops else begin(module(x))
            states = (x,)
    return _trace_join(states)


def _trace_layer(module: nn.Module, x: Tensor, channels: slice | None = None) -> Tensor:
    y, *kept = call_layer(module, x, channels)
    options = {} if channels is None or not kept else {"channels": channels}
    with torch.no_grad():
        back = cast(Any, module).inverse(y.detach(), *kept, **options)
    return _undo(y, Mode.INVERT.value, back, x, x, kept)


def _trace_join(states: States) -> Tensor:
    if len(states) == 1:
        return states[0]
    y = x = join_halves(*states)
    for before, back in zip(states, halve(y.detach()), strict=True):
        x = _undo(x, Mode.INVERT.value, back, before, before)
    return x


def trace_split(x: Tensor, split: Callable[[Tensor], Pair], join: Callable[[Tensor, Tensor], Tensor]) -> Pair:
    """Return the two states into which one is split, while that is traced; `join` undoes it."""
    x1, x2 = split(x)
    x2 = begin(x2)
    return _undo(x1, Mode.INVERT.value, join(x1.detach(), x2.detach()), x, x), x2


def begin(x: Tensor) -> Tensor:
    """Return a stream as the first state of a chain, or as the input of a node."""
    return _undo(x, BEGIN)


def _undo(
    after: Tensor,
    mode: str,
    back: Tensor | None = None,
    before: Tensor | None = None,
    current: Tensor | None = None,
    kept: Sequence[Tensor] = (),
    is_equal: Tensor | None = None,
) -> Tensor:
    """Return a state tied to what undoes it; without gradients the state alone."""
    if not torch.is_grad_enabled():
        return after
    before = after if before is None else before
    back = before if back is None else restore_strides(back, get_strides(before))
    return undo(after, back, before, before if current is None else current, is_equal, list(kept), mode)


def advance(update: Update, pair: Pair, out: Tensor | None, mode: Mode, is_exact: bool = False) -> Pair:
    """Return the states after a step or bijection.

    Args:
        update: how it changes them.
        pair: the states before it.
        out: what the step's function has made of the newer one.
        mode: of the step.
        is_exact: whether the states before it are rebuilt bit by bit.
    """
    previous, current = pair
    following = update.advance(pair, out)[1]
    kept, back, is_equal = list(update.lost_bits), previous, None
    if mode.inverts:
        with torch.no_grad():
            back, _ = update.invert((current.detach(), following.detach()), None if out is None else out.detach())
            if is_exact:
                kept.append(square_bits(previous.detach()))
                is_equal = square_bits(back) == kept[-1]
    return current, _undo(following, mode.value, back, previous, current, kept, is_equal)
