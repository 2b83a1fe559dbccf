"""RMS norms of long texts, run in pieces along tokens.

Those of language models are written out in float32: six tensors of the state's size are alive in backward. A norm's second run
in backward is no product of matrices: so it keeps its input alone, and runs again on one piece at a time.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from revzoo.runtime.inventory import take_inventory
from revzoo.runtime.pieces import run_in_pieces
from revzoo.runtime.tiles import find_tiles
from revzoo.runtime.transforms import must_store


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
    forward = partial(type(norm).forward, norm)
    if kwargs or len(args) != 1 or args[0].dim() < 2 or must_store():
        return forward(*args, **kwargs)  # it is given more than tokens
    x: Tensor = args[0]
    kept = state if x is of_state and not x._version else None  # a block may write into what it is given
    stand_in = norm.__dict__.pop("forward", None)
    try:
        return run_in_pieces(forward, norm, f"a {type(norm).__name__}", x, count, kept)
    finally:
        if stand_in is not None:
            norm.__dict__["forward"] = stand_in
