"""Which steps are cut into tiles, and where: pieces of a state along one of its dimensions.

`tiled_step.py` runs such a step tile by tile, in forward and in backward, so that never more than what autograd saves in one
tile exists at a time. That is right for a function that treats the places along the dimension by themselves, as an MLP treats
tokens, a 1x1 convolution pixels, and nearly everything without batch statistics examples.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar, cast

from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map_with_path

from revzoo.errors import InputError
from revzoo.runtime.nested import map_tensors, tensors_in

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
        examples: which tensors of the side input have a place for each example, by their names in it: said, or seen.
    """

    count: int
    dim: int
    examples: dict[str, bool] = field(default_factory=dict)

    def cut(self, x: Tensor) -> list[Tile]:
        """Return the tiles of a state; no more of them than places."""
        dim = self.dim % x.dim()
        length = x.shape[dim]
        size = -(-length // self.count) or 1
        return [Tile(dim, start, min(size, length - start)) for start in range(0, max(length, 1), size)]

    def count_pieces(self, places: int) -> int:
        """Return into how many pieces to cut each place in other ways: several if there are fewer places than tiles."""
        return -(-self.count // max(places, 1))


def tiled(f: M, tiles: int, dim: int = 1, side: Any = None) -> M:
    """Return f, marked to be run tile by tile where it is a step of a chain; with one tile, whole.

    Its state dict, and what it returns when it is called by itself, stay as they are. The first forward of a chain tests it.

    Args:
        f: a module whose results along `dim` each depend on the same place of its input alone.
        tiles: into how many pieces its state is cut.
        dim: of the state: 0 are examples, 1 the tokens of (batch, tokens, channels).
        side: which tensors of the side input have a place for each example, where examples are cut: True or False in place of
            each, or one for all. None: those of a batch's size, which has to be seen in a batch of another size than its tokens
            and channels.
    Raises:
        InputError: tiles is no number above 0, or f is no module.
    Cost: one extra forward, as without tiles, in more and smaller kernels.
    """
    if not isinstance(f, nn.Module):
        raise InputError(f"A step is a torch.nn.Module. Received: {type(f).__name__}.")
    check_tiles(tiles)
    if type(dim) is not int:
        raise InputError(f"dim is an integer. Received: {dim!r}.")
    f.__dict__[MARK] = Tiles(tiles, dim, {name: bool(belongs) for name, belongs in _name_leaves(side)})
    return f


def check_tiles(tiles: Any) -> None:
    """Raise InputError unless it is a number of tiles."""
    if type(tiles) is not int or tiles < 1:
        raise InputError(f"tiles is an integer from 1. Received: {tiles!r}.")


def find_tiles(f: Callable[..., Any]) -> Tiles | None:
    """Return into what f is cut as a step, None if it is run whole."""
    tiles: Tiles | None = f.__dict__.get(MARK) if isinstance(f, nn.Module) else None
    return None if tiles is None or tiles.count == 1 else tiles


def cut_side(side: Any, tile: Tile, x: Tensor, examples: Mapping[str, bool]) -> Any:
    """Return the side input of a tile of x: along examples, a tensor that has a place for each of them is cut, too.

    A side input with a method `cut` does it itself: only what it has in `arguments` is cut.

    Args:
        examples: of `Tiles`.
    """
    if side is None or tile.dim:
        return side
    if hasattr(side, "cut"):
        return side.cut(tile, x, examples)

    def cut(t: Tensor) -> Tensor:
        return tile.of(t) if t.dim() and t.shape[0] == x.shape[0] > 1 else t

    says = examples.get("", True)  # for all
    return tree_map_with_path(lambda at, leaf: map_tensors(cut, leaf) if examples.get(keystr(at), says) else leaf, side)


def note_examples(side: Any, x: Tensor, examples: dict[str, bool]) -> list[str]:
    """Note which tensors of a side input have a place for each example of x; return those of which their shapes do not tell.

    They do not where as many tokens or channels as examples could be what a tensor has places for.
    """
    unclear = list[str]()
    for name, leaf in _name_leaves(getattr(side, "arguments", side)):
        lengths = {t.shape[0] for t in tensors_in(leaf) if t.dim()}
        if name in examples or "" in examples or not lengths - {1} or len(x) == 1:
            continue
        if len(x) in lengths and len(x) in x.shape[1:]:
            unclear.append(name)
        else:
            examples[name] = len(x) in lengths
    return unclear


def _name_leaves(side: Any) -> Iterator[tuple[str, Any]]:
    return ((keystr(at), leaf) for at, leaf in ([] if side is None else tree_flatten_with_path(side)[0]))


def cut_terms(f: Callable[..., Any], x: Tensor, side: Any, count: int) -> list[Any]:
    """Return the side inputs of terms whose sum is f(x) - x, at most count of them; none unless f has a method `cut_terms`."""
    return cast(Any, f).cut_terms(x, side, count) if count > 1 and hasattr(f, "cut_terms") else []
