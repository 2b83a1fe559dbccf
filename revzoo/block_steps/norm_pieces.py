"""RMS norms of long texts, run in pieces along tokens.

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
def norms_in_pieces(step: nn.Module, examples: int, state: Tensor, x: Tensor) -> Iterator[None]:
    """Run the RMS norms of a step in pieces inside the block, where it is cut along examples and has fewer than tiles.

    Args:
        step: the step.
        examples: how many its state has, or that of which this is a tile.
        state: its state.
        x: the same in the dtype that the block is given. A norm of it keeps the state, which is there anyway.
    """
    tiles = find_tiles(step)
    pieces = 1 if tiles is None or tiles.dim else tiles.count_pieces(examples)
    if pieces == 1 or not torch.is_grad_enabled() or torch.compiler.is_compiling():
        yield
        return
    norms = [module for module in take_inventory(step).modules if _is_written_out(module)]
    for norm in norms:
        norm.__dict__["forward"] = partial(_run, norm, pieces, state, x)
    try:
        yield
    finally:
        for norm in norms:
            del norm.__dict__["forward"]


def cut_next_norm(step: nn.Module, owner: nn.Module | None, examples: int) -> None:
    """Run the next RMS norm beside a list of blocks in pieces, which comes after the last block."""
    tiles = find_tiles(step)
    pieces = 1 if tiles is None else tiles.count_pieces(examples)
    if owner is not None and pieces > 1 and torch.is_grad_enabled():
        for norm in filter(_is_written_out, owner.children()):
            norm.__dict__["forward"] = partial(_run_next, owner, norm, pieces)


def leave_next_norm(owner: nn.Module | None) -> None:
    """Undo `cut_next_norm`."""
    for norm in () if owner is None else owner.children():
        if getattr(norm.__dict__.get("forward"), "func", None) is _run_next:
            del norm.__dict__["forward"]


def _run_next(owner: nn.Module, norm: nn.Module, pieces: int, *args: Any, **kwargs: Any) -> Any:
    leave_next_norm(owner)
    if torch.compiler.is_compiling():
        return norm.forward(*args, **kwargs)
    return _run(norm, pieces, None, None, *args, **kwargs)


def _is_written_out(module: nn.Module) -> bool:
    if not type(module).__name__.endswith("RMSNorm") or isinstance(module, nn.RMSNorm):
        return False
    return not module._modules and "forward" not in module.__dict__


def _run(norm: nn.Module, count: int, state: Tensor | None, of_state: Tensor | None, *args: Any, **kwargs: Any) -> Any:
    parameters = list(norm.parameters())
    if kwargs or len(args) != 1 or args[0].dim() < 2 or any(p.shape != args[0].shape[-1:] for p in parameters):
        return type(norm).forward(norm, *args, **kwargs)  # it is given more than tokens, or is not of their channels
    x: Tensor = args[0]
    dim = max(range(x.dim() - 1), key=x.shape.__getitem__)
    kept = state if x is of_state and not x._version else x  # a block may write into what it is given
    return _InPieces.apply(norm, Tiles(count, dim).cut(x), x.dtype, kept, *parameters)


class _InPieces(torch.autograd.Function):
    """Return what a norm returns, of one piece after the other; keep its input and its parameters."""

    @staticmethod
    def forward(ctx: Any, norm: nn.Module, tiles: list[Tile], dtype: torch.dtype, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.norm, ctx.tiles, ctx.dtype, ctx.settings = norm, tiles, dtype, Settings(x.device)
        ctx.save_for_backward(x, *parameters)
        out = None
        for tile in tiles:
            piece = type(norm).forward(norm, tile.of(x).to(dtype))
            out = torch.empty_like(x, dtype=piece.dtype) if out is None else out  # which its parameters may decide
            tile.of(out).copy_(piece)
        return cast(Tensor, out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x, *parameters), (needs_x, *needed) = ctx.saved_tensors, ctx.needs_input_grad[3:]
        sums = {i: torch.zeros_like(parameters[i]) for i, needs in enumerate(needed) if needs}
        asked = [parameters[i] for i in sums]
        whole = torch.empty_like(x) if needs_x else None
        for tile in ctx.tiles:
            piece = tile.of(x).detach().requires_grad_(needs_x)
            with torch.enable_grad(), _as_in_forward(ctx.norm, parameters, ctx.settings):
                out = type(ctx.norm).forward(ctx.norm, piece.to(ctx.dtype))
            gradients = torch.autograd.grad(out, [*asked, piece] if needs_x else asked, tile.of(grads[0]))
            if whole is not None:
                tile.of(whole).copy_(gradients[-1])
            for total, gradient in zip(sums.values(), gradients[: len(asked)], strict=True):
                total += gradient
        return None, None, None, whole, *map(sums.get, range(len(parameters)))


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
