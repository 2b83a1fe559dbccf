"""RMS norms of one text, run piece by piece where its attention cannot be.

Those of language models are written out in float32: six tensors of the state's size are alive in backward. A norm treats every
token by itself, and its second run in backward is no product of matrices: so it keeps its input alone, and runs again on one
piece at a time.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from revzoo.runtime.inventory import take_inventory
from revzoo.runtime.settings import Settings
from revzoo.runtime.tiles import Tile, Tiles, find_tiles


@contextmanager
def norms_in_pieces(step: nn.Module, examples: int) -> Iterator[None]:
    """Run the RMS norms of a step in pieces inside the block, where it is cut along examples and has fewer than tiles."""
    tiles = find_tiles(step)
    pieces = 1 if tiles is None or tiles.dim else -(-tiles.count // max(examples, 1))
    if pieces == 1 or not torch.is_grad_enabled() or torch.compiler.is_compiling():
        yield
        return
    norms = [module for module in take_inventory(step).modules if _is_written_out(module)]
    for norm in norms:
        norm.__dict__["forward"] = partial(_run, norm, pieces)
    try:
        yield
    finally:
        for norm in norms:
            del norm.__dict__["forward"]


def _is_written_out(module: nn.Module) -> bool:
    if not type(module).__name__.endswith("RMSNorm") or isinstance(module, nn.RMSNorm):
        return False
    return not module._modules and "forward" not in module.__dict__


def _run(norm: nn.Module, count: int, *args: Any, **kwargs: Any) -> Any:
    if kwargs or len(args) != 1 or args[0].dim() < 2:  # it is given more than a state
        return type(norm).forward(norm, *args, **kwargs)
    (x,) = args
    dim = max(range(x.dim() - 1), key=x.shape.__getitem__)
    return _InPieces.apply(norm, Tiles(count, dim).cut(x), x, *norm.parameters())


class _InPieces(torch.autograd.Function):
    """Return what a norm returns, of one piece after the other; keep its input and its parameters."""

    @staticmethod
    def forward(ctx: Any, norm: nn.Module, tiles: list[Tile], x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.norm, ctx.tiles, ctx.settings = norm, tiles, Settings(x.device)
        ctx.save_for_backward(x, *parameters)
        return torch.cat([type(norm).forward(norm, tile.of(x)) for tile in tiles], tiles[0].dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x, *parameters), (needs_x, *needed) = ctx.saved_tensors, ctx.needs_input_grad[2:]
        sums = {i: torch.zeros_like(parameters[i]) for i, needs in enumerate(needed) if needs}
        asked = [parameters[i] for i in sums]
        pieces = list[Tensor]()
        for tile in ctx.tiles:
            piece = tile.of(x).detach().requires_grad_(needs_x)
            with torch.enable_grad(), _as_in_forward(ctx.norm, parameters, ctx.settings):
                out = type(ctx.norm).forward(ctx.norm, piece)
            gradients = torch.autograd.grad(out, [*asked, piece] if needs_x else asked, tile.of(grads[0]))
            pieces += gradients[len(asked) :]
            for total, gradient in zip(sums.values(), gradients[: len(asked)], strict=True):
                total += gradient
        return None, None, torch.cat(pieces, ctx.tiles[0].dim) if needs_x else None, *map(sums.get, range(len(parameters)))


@contextmanager
def _as_in_forward(norm: nn.Module, parameters: Sequence[Tensor], settings: Settings) -> Iterator[None]:
    """Give a norm the parameters that it had in forward, and PyTorch its settings."""
    own, entered = norm._parameters, settings.enter()
    norm._parameters = own | dict(zip((name for name, p in own.items() if p is not None), cast(Any, parameters), strict=True))
    try:
        yield
    finally:
        norm._parameters = own
        settings.leave(entered)
