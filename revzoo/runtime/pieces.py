"""A function that runs on one piece of its input after the other, each a recorded call of its own.

    x --> kept once --> cut --> f of every piece, recorded --> joined

So backward holds what autograd saves in one piece at a time. Autograd keeps x itself: inside of a step that drops what is saved
in it, x is dropped, too, and a piece runs again on the x of the step's second run. The gradients of the pieces are added to
that of x in its own memory.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from revzoo.runtime.exact import attach_graph, scale_gradient
from revzoo.runtime.forward import Forward
from revzoo.runtime.independence import find_mixing
from revzoo.runtime.inventory import take_inventory
from revzoo.runtime.recorded_call import RecordedCall
from revzoo.runtime.round import begin_round
from revzoo.runtime.segment import SavedInputs
from revzoo.runtime.tiles import Tile, Tiles
from revzoo.runtime.update import States


class Sum:
    """The gradient of a tensor, to which the pieces of it add theirs one after the other."""

    gradient: Tensor | None = None


class Cut(torch.autograd.Function):
    """Return a tensor and a tile of it; their gradients are added in the memory of `total`, which nobody else has."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tile: Tile, total: Sum, is_first: bool) -> tuple[Tensor, Tensor]:
        ctx.tile, ctx.total, ctx.is_first, ctx.shape = tile, total, is_first, x.shape
        ctx.set_materialize_grads(False)
        return x.detach(), tile.of(x.detach())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None, None]:
        whole, part = grads
        if part is None:
            return whole, None, None, None
        total = ctx.total
        if whole is None:
            whole = part.new_zeros(ctx.shape)
        elif whole is not total.gradient:  # others may hold it
            whole = whole.clone()
        ctx.tile.of(whole).add_(part)
        total.gradient = None if ctx.is_first else whole
        return whole, None, None, None


class Join(torch.autograd.Function):
    """Return a tensor, computed elsewhere; its gradient goes to the tiles of it, and to what else was added.

    Args:
        whole: the tensor.
        tiles: of it; several terms may be of one tile.
        get_weights: returns those of the other terms, and last that of all tiles. With a random sign they are tensors.
        terms: what stands for the tiles (`stand_in`), and the other terms.
    """

    @staticmethod
    def forward(ctx: Any, whole: Tensor, tiles: Sequence[Tile], get_weights: Callable[[], Any], *terms: Tensor) -> Tensor:
        ctx.tiles, ctx.get_weights, ctx.dtype = tiles, get_weights, terms[0].dtype
        return whole.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (*others, c) = grads, ctx.get_weights()
        # Terms of one tile share theirs, in the dtype that autograd would make of it for each.
        changes = {tile: cast(Tensor, scale_gradient(tile.of(grad), c)).to(ctx.dtype) for tile in dict.fromkeys(ctx.tiles)}
        return None, None, None, *map(changes.get, ctx.tiles), *(scale_gradient(grad, weight) for weight in others)


def stand_in(x: Tensor) -> Tensor:
    """Return a tensor without memory that has the shape and the graph of x."""
    return attach_graph(x.new_empty(()).expand(x.shape), (1.0,), x)


class _Keep(torch.autograd.Function):
    """Return x, and let autograd keep another tensor as long as the second result is there, also if x needs no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tensor: Tensor, anchor: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(tensor)
        out = x.detach()
        if not x.requires_grad:
            ctx.mark_non_differentiable(out)
        return out, anchor.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0], None, None


class _Kept:
    """What autograd keeps for all pieces: it is asked once in a backward, since it may have to run a step again for it.

    Args:
        count: of pieces.
        dtype: of f's input.
    """

    anchor: Any = None  # of whose node it asks

    def __init__(self, count: int, dtype: torch.dtype):
        self._count, self._dtype = count, dtype
        self._tensor: Tensor | None = None
        self._given = 0

    def get(self, tile: Tile) -> Tensor:
        """Return a piece."""
        if self._tensor is None:
            (kept,) = self.anchor.grad_fn.saved_tensors
            self._tensor = kept.detach()
        piece = tile.of(self._tensor).to(self._dtype)
        self._given += 1
        if self._given == self._count:
            self._tensor, self._given = None, 0
        return piece


class _KeptPiece(NamedTuple):
    """A piece, as `SavedInputs` asks for it."""

    kept: _Kept
    tile: Tile

    def get(self, _: Callable[[], str]) -> States:
        return (self.kept.get(self.tile),)


def run_in_pieces(
    f: Callable[[Tensor], Tensor], module: nn.Module, name: str, x: Tensor, count: int, kept: Tensor | None = None
) -> Tensor:
    """Return f(x), computed in pieces along its longest dimension but the last.

    If f mixes the places, or draws random numbers, it is computed as a whole.

    Args:
        f: returns a tensor of the shape of x.
        module: what f computes with.
        name: of f, for messages.
        x: its input.
        count: of pieces.
        kept: a tensor with the numbers of x in another dtype, which is there anyway; None keeps x.
    """
    dim = max(range(x.dim() - 1), key=x.shape.__getitem__)
    tiles, inventory = Tiles(count, dim).cut(x), take_inventory(module)
    what = lambda part, _: f(part), inventory, x.detach(), dim, tiles[0].length
    if len(tiles) == 1 or find_mixing(*what, may_draw=False) is not None:
        return f(x)
    forward, total, pieces = Forward(x), Sum(), _Kept(len(tiles), x.dtype)
    forward.round = begin_round(module, x, (count,))
    x, pieces.anchor = _Keep.apply(x, (x if kept is None else kept).detach(), x.new_empty(0).requires_grad_())
    whole, outs = x, list[Tensor]()
    with forward:
        for tile in tiles:
            x, piece = Cut.apply(x, tile, total, not outs)
            call = RecordedCall(f, name, forward, inventory=inventory)
            out = call.first_run(SavedInputs(_KeptPiece(pieces, tile), forward.round), piece)
            with torch.no_grad():
                whole = whole if outs else torch.empty_like(x, dtype=out.dtype)  # which its parameters may decide
                tile.of(whole).copy_(out)
            outs.append(stand_in(out))
            del out
    return Join.apply(whole, tiles, lambda: (1.0,), *outs)
