"""Tensors that several spans compute again, each for itself, so that none has to keep them: the skips of a U-Net, for example.

What crosses a border of spans is kept, and a skip crosses many. But often a norm and an activation compute the skip from the
result of a product, which backward needs as well. Then only that result is kept, and the skip is made again twice: where it is
read last, and where it was made. The largest such tensor may also be made again from further back, through products, if less
has to be kept for that; the first skip of a U-Net needs nothing but the images.

A span has to know what the others leave to it. So these tensors are chosen once for the whole graph, and the search is repeated
for a few such sets (`front.py`): the largest tensor with and without the next, and ever fewer products kept for it.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from revzoo.graph.span_choices import Choices, Remade

_MOST = 3  # tensors of a set, besides what they are made from
_LEAST_SHARE = 100  # a tensor is considered if it is at least such a part of the stored activations
_LONGEST = 10  # spans that are no longer than such a part of the calls keep what they read
_CHEAP = 10  # making it again through products may take such a part of the forward


@dataclass(frozen=True)
class _Recipe:
    """How a tensor is made again.

    Args:
        storages: those that are made.
        roots: the storages that they are made from.
    """

    storages: frozenset[int]
    roots: frozenset[int]

    def count_bytes(self, choices: Choices) -> int:
        """Return the size of the roots."""
        return sum(choices.sizes[k] for k in self.roots)


def list_remade(choices: Choices) -> Iterator[Remade]:
    """Yield sets of what is made again; none if every tensor is kept by its own span or needed there alone.

    Args:
        choices: of the graph, with nothing remade.
    """
    recipes = _list_largest(choices)
    if recipes:
        largest, others = next(iter(recipes)), list(recipes.values())[1:]
        for recipe in (recipes[largest], *_list_deeper(choices, largest, recipes[largest])):
            for rest in [[], others] if others else [[]]:
                yield _unite(choices, [recipe, *rest])


def _list_largest(choices: Choices) -> dict[int, _Recipe]:
    """Return the largest tensors that spans may make again without a product, with how they do."""
    record, size = choices.record, choices.sizes
    recipes = dict[int, _Recipe]()
    for k in sorted(range(len(size)), key=lambda k: (-size[k], -record.storages[k].last_use)):
        storage = record.storages[k]
        if len(recipes) == _MOST or size[k] * _LEAST_SHARE < record.peak_bytes - record.fixed_bytes:
            break
        is_read_later = storage.last_use > max(storage.saved_by, default=storage.last_use)  # by what does not save it
        is_far = (storage.last_use - storage.born) * _LONGEST > len(record.atoms)
        is_part = any(k in recipe.storages for recipe in recipes.values())
        if is_read_later and is_far and not is_part and k not in choices.always and not record.flops[storage.born]:
            recipe = _find_recipe(choices, k, frozenset())
            if recipe is not None and recipe.count_bytes(choices) <= size[k]:
                recipes[k] = recipe
    return recipes


def _list_deeper(choices: Choices, k: int, recipe: _Recipe) -> Iterator[_Recipe]:
    """Yield recipes through ever more products that start from ever less."""
    through, least = recipe.roots, recipe.count_bytes(choices)
    while least and (deeper := _find_recipe(choices, k, through)) is not None and _is_cheap(choices, deeper):
        if deeper.count_bytes(choices) < least:
            yield deeper
            least = deeper.count_bytes(choices)
        through |= deeper.roots


def _find_recipe(choices: Choices, k: int, through: frozenset[int]) -> _Recipe | None:
    """Return how a tensor is made again from the results of all products but some; None if it cannot be."""
    record = choices.record
    made, roots, waiting = set[int](), set[int](), [k]
    while waiting:
        j = waiting.pop()
        storage = record.storages[j]
        if j in made or j in choices.always:
            continue
        if record.flops[storage.born] and j not in through:
            roots.add(j)
            continue
        is_in_one_graph = bisect_right(record.walls, storage.born) == bisect_right(record.walls, storage.last_use)
        if storage.maker is None or not is_in_one_graph:
            return None
        made.add(j)
        waiting += choices.reads[storage.born]
    is_saved = all(record.storages[j].saved_by for j in roots)
    return _Recipe(frozenset(made), frozenset(roots)) if is_saved else None


def _is_cheap(choices: Choices, recipe: _Recipe) -> bool:
    record = choices.record
    atoms = {record.storages[k].born for k in recipe.storages}
    work = choices.price(sum(record.flops[i] for i in atoms), sum(choices.made[i] for i in atoms))
    return work * _CHEAP <= choices.price(sum(record.flops), sum(choices.made))


def _unite(choices: Choices, recipes: Sequence[_Recipe]) -> Remade:
    """Return what several recipes make together."""
    made = frozenset[int]().union(*(each.storages for each in recipes))
    roots = frozenset[int]().union(*(each.roots for each in recipes))
    return Remade({k: _list_atoms(choices, k, made) for k in made}, roots - made)


def _list_atoms(choices: Choices, k: int, made: frozenset[int]) -> tuple[int, ...]:
    """Return the atoms that make a tensor and what it is made from."""
    seen, waiting = set[int](), [k]
    while waiting:
        j = waiting.pop()
        if j in made and j not in seen:
            seen.add(j)
            waiting += choices.reads[choices.record.storages[j].born]
    return tuple(sorted({choices.record.storages[j].born for j in seen}))
