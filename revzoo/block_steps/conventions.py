"""What blocks of Transformers, timm and others are given, return, and are set to."""

import copy
import inspect
from collections.abc import Mapping
from typing import Any, cast

from torch import Tensor, nn

from revzoo.errors import InputError


def look_for_state(block: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, str | None]:
    """Return the first argument of a block, whatever it is, and its keyword, if it has one."""
    if args:
        return args[0], None
    parameters = list(inspect.signature(type(block).forward).parameters)[1:]
    key = next((name for name in parameters if name in kwargs), None)
    return (None if key is None else kwargs[key]), key


def find_state(block: nn.Module, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Tensor, str | None]:
    """Return the state that a block is given, and its keyword, if it has one.

    Args:
        block: the block.
        name: of it, for messages.
        args: positional arguments of the call.
        kwargs: keyword arguments of the call.
    """
    x, key = look_for_state(block, args, kwargs)
    if not isinstance(x, Tensor) or not x.is_floating_point():
        received = f"a tensor of {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
        raise InputError(
            f"{name} is a step of a reversible chain, whose first argument is the state, a floating-point tensor. "
            f"Received: {received}. Make another list of blocks reversible."
        )
    return x, key


def put_state(
    state: Tensor | None, key: str | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a block with another state; `key` as from `find_state`."""
    return ((state, *args[1:]), kwargs) if key is None else (args, {**kwargs, key: state})


def leave_out_caches(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a block with None in place of caches."""
    return tuple(None if is_cache(x) else x for x in args), {key: None if is_cache(x) else x for key, x in kwargs.items()}


def list_results(value: Any) -> list[Any]:
    """Return what a block returns, one by one."""
    if isinstance(value, dict):
        return list(value.values())
    return list(value) if isinstance(value, tuple | list) else [value]


def find_place(value: Any, state: Tensor) -> int:
    """Return which result of a block is its new state: the first that is shaped like the one it was given, or the first.

    A block of two streams may return them in another order than it is given them.
    """
    places = (i for i, t in enumerate(list_results(value)) if isinstance(t, Tensor) and t.shape == state.shape)
    return next(places, 0)


def get_state(value: Any, place: int = 0) -> Any:
    """Return the state among what a block returns: all of it, or that in this place of a tuple or dict."""
    results = list_results(value)
    return results[place] if place < len(results) else None


def is_cache(x: Any) -> bool:
    """Return whether an argument of a block is a cache of keys and values, as those of Transformers are."""
    return not isinstance(x, type) and callable(getattr(x, "get_seq_length", None)) and callable(getattr(x, "update", None))


def is_empty_cache(cache: Any) -> bool:
    """Return whether a cache holds nothing yet. One of states instead of keys cannot tell, and counts as full."""
    try:
        return not cache.get_seq_length()
    except ValueError:
        return False


def replace_state(value: Any, state: Tensor | None, place: int = 0) -> Any:
    """Return what a block returns with another state."""
    if isinstance(value, dict):
        others = copy.copy(value)  # of its own class
        others[list(value)[place]] = state
        return others
    if not isinstance(value, tuple | list):
        return state
    results = (*value[:place], state, *value[place + 1 :])
    return cast(Any, type(value))(*results) if hasattr(value, "_fields") else type(value)(results)
