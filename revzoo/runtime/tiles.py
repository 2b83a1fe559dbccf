"""Which steps are cut into tiles, and where: pieces of a state along one of its dimensions.

`tiled_step.py` runs such a step tile by tile, in forward and in backward, so that never more than what autograd saves in one
tile exists at a time. That is right for a function that treats the places along the dimension by themselves, as an MLP treats
tokens, a 1x1 convolution pixels, and nearly everything without batch statistics examples.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar, cast

from torch import Tensor, nn

from revzoo.errors import InputError
from revzoo.runtime.nested import map_tensors

M = TypeVar("M", bound=nn.Module)
MARK = "_revzoo_tiles"  # in the module's __dict__


class Tile(NamedTuple):
    """A piece of a state.

    Args:
        dim: the dimension that is cut.
        start: the first place along it.
        length: the number of places.
    """

    dim: int
    start: int
    length: int

    def of(self, x: Tensor) -> Tensor:
        """Return this piece of a tensor, as a view."""
        return x.narrow(*self)


@dataclass
class Tiles:
    """Into how many pieces a step is cut.

    Args:
        count: the largest number of pieces. The last one is shorter where they do not divide the length.
        dim: the dimension of the state that is cut.
        tested: with which training flags of its modules f has been seen to treat its places by themselves.
    """

    count: int
    dim: int
    tested: set[tuple[bool, ...]] = field(default_factory=set)

    def cut(self, x: Tensor) -> list[Tile]:
        """Return the tiles of a state; no more of them than places."""
        dim = self.dim % x.dim()
        length = x.shape[dim]
        size = -(-length // self.count) or 1
        return [Tile(dim, start, min(size, length - start)) for start in range(0, max(length, 1), size)]

    def count_pieces(self, places: int) -> int:
        """Return into how many pieces to cut each place in other ways: several if there are fewer places than tiles."""
        return -(-self.count // max(places, 1))


def tiled(f: M, tiles: int, dim: int = 1) -> M:
    """Return f, marked to be run tile by tile where it is a step of a chain; with one tile, whole.

    Its state dict, and what it returns when it is called by itself, stay as they are. The first forward of a chain tests it.

    Args:
        f: a module whose results along `dim` each depend on the same place of its input alone.
        tiles: into how many pieces its state is cut.
        dim: of the state: 0 are examples, 1 the tokens of (batch, tokens, channels).
    Raises:
        InputError: tiles is no number above 0, or f is no module.
    Cost: one extra forward, as without tiles, in more and smaller kernels.
    """
    if not isinstance(f, nn.Module):
        raise InputError(f"A step is a torch.nn.Module. Received: {type(f).__name__}.")
    check_tiles(tiles)
    if type(dim) is not int:
        raise InputError(f"dim is an integer. Received: {dim!r}.")
    f.__dict__[MARK] = Tiles(tiles, dim)
    return f


def check_tiles(tiles: Any) -> None:
    """Raise InputError unless it is a number of tiles."""
    if type(tiles) is not int or tiles < 1:
        raise InputError(f"tiles is an integer from 1. Received: {tiles!r}.")


def find_tiles(f: Callable[..., Any]) -> Tiles | None:
    """Return into what f is cut as a step, None if it is run whole."""
    tiles: Tiles | None = f.__dict__.get(MARK) if isinstance(f, nn.Module) else None
    return None if tiles is None or tiles.count == 1 else tiles


def cut_side(side: Any, tile: Tile, x: Tensor) -> Any:
    """Return the side input of a tile of x: along examples, a tensor that has a place for each of them is cut, too.

    A side input with a method `cut` does it itself.
    """
    if side is None or tile.dim:
        return side
    if hasattr(side, "cut"):
        return side.cut(tile, x)
    return map_tensors(lambda t: tile.of(t) if t.dim() and t.shape[0] == x.shape[0] > 1 else t, side)


def cut_terms(f: Callable[..., Any], side: Any, count: int) -> list[Any]:
    """Return the side inputs of terms whose sum is f(x) - x, at most count of them; none unless f has a method `cut_terms`."""
    return cast(Any, f).cut_terms(side, count) if count > 1 and hasattr(f, "cut_terms") else []
