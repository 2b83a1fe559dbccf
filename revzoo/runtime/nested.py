"""The tensors in nested collections: batches, outputs of models, arguments of operations.

PyTorch's pytrees know lists, tuples, dictionaries, named tuples and whatever registered itself. A batch may also be a mapping
that is not registered, such as the BatchEncoding of Hugging Face's tokenizers, or any iterable; outputs may be dataclasses.
NumPy arrays hold no tensors.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_iter, tree_map


def tensors_in(tree: Any, _inside: frozenset[int] = frozenset()) -> Iterator[Tensor]:
    """Yield the tensors in nested collections, in order. A generator among them is used up.

    `_inside` has the dataclasses around the present one: one that refers to itself is looked into once.
    """
    if isinstance(tree, Tensor):  # nearly every call, one for each operation of a traced run
        yield tree
        return
    if type(tree) in (tuple, list):  # the arguments of an operation
        for item in tree:
            if item is not None and not isinstance(item, int | float):
                yield from tensors_in(item, _inside)
        return
    for leaf in tree_iter(tree):
        if isinstance(leaf, Tensor):
            yield leaf
        elif isinstance(leaf, Mapping):
            yield from tensors_in(leaf.values(), _inside)
        elif isinstance(leaf, Iterable) and not isinstance(leaf, str | bytes) and not hasattr(leaf, "__array__"):
            for item in leaf if isinstance(leaf, Iterator) else _list_items(leaf):
                yield from tensors_in(item, _inside)
        elif id(leaf) not in _inside and (held := _read_fields(leaf)):
            yield from tensors_in(held.values(), _inside | {id(leaf)})


def map_tensors(function: Callable[[Tensor], Any], tree: Any, _inside: frozenset[int] = frozenset()) -> Any:
    """Return the nested collections with `function` applied to every tensor.

    Collections keep their type, except for mappings that PyTorch's pytrees do not know: they become dictionaries. Iterables
    that are neither, such as generators, are returned as they are.
    """
    if isinstance(tree, Tensor):  # nearly every call, as above
        return function(tree)

    def convert(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return function(leaf)
        if isinstance(leaf, Mapping):
            return {key: map_tensors(function, value, _inside) for key, value in leaf.items()}
        if isinstance(leaf, tuple | list):  # a subclass that is not registered
            return type(leaf)(map_tensors(function, item, _inside) for item in leaf)
        inside, held = _inside | {id(leaf)}, {} if id(leaf) in _inside else _read_fields(leaf)
        if next(tensors_in(held.values(), inside), None) is not None:
            leaf = copy.copy(leaf)
            for name, value in held.items():
                object.__setattr__(leaf, name, map_tensors(function, value, inside))  # it may be frozen
        return leaf

    return tree_map(convert, tree)


def _read_fields(leaf: Any) -> dict[str, Any]:
    """Return what a dataclass holds; nothing of any other object."""
    names = [each.name for each in fields(leaf)] if is_dataclass(type(leaf)) else []
    return {name: getattr(leaf, name) for name in names if hasattr(leaf, name)}


def _list_items(leaf: Iterable[Any]) -> list[Any]:
    """Return the items that can be had: Transformers' caches stop at a layer without keys, as hybrid networks have some."""
    items: list[Any] = []
    with suppress(Exception):
        items.extend(leaf)
    return items


def wraps_tensors(tensor_type: type) -> bool:
    """Return whether instances of this type wrap other tensors, as DTensor does."""
    return issubclass(tensor_type, Tensor) and hasattr(tensor_type, "__tensor_flatten__")
