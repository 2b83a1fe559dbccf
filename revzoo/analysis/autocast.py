"""How deep blocks of autocast are nested, and running what belongs after all of them."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def count_autocast() -> int:
    """Return how many blocks of autocast are entered."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def set_autocast_depth(depth: int) -> None:
    """Enter or leave blocks of autocast until there are so many; what is cast in them stays as it is."""
    for _ in range(count_autocast(), depth):
        torch.autocast_increment_nesting()
    for _ in range(depth, count_autocast()):
        torch.autocast_decrement_nesting()


@contextmanager
def leave_autocast() -> Iterator[None]:
    """Run what is inside the block as after the surrounding autocast, where backward belongs.

    Autocast keeps a cast of every weight until its outermost block ends, and then frees those that nothing has saved. Inside
    it is off, its casts are freed, and a recovery that enters it again frees its own at the end, as after that block.
    """
    kinds = [kind for kind in torch._C._autocast_supported_devices() if torch.is_autocast_enabled(kind)]
    depth = count_autocast()
    try:
        for kind in kinds:
            torch.set_autocast_enabled(kind, False)
        set_autocast_depth(0)
        torch.clear_autocast_cache()
        yield
    finally:
        set_autocast_depth(depth)
        for kind in kinds:
            torch.set_autocast_enabled(kind, True)
