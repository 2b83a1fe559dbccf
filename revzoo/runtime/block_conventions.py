"""What blocks of Transformers, timm and others are given, return, and are set to."""

from collections.abc import Mapping
from copy import copy
from dataclasses import fields, is_dataclass, replace
from typing import Any, cast

from torch import Tensor, nn

_CHECKPOINTING = ("gradient_checkpointing", "grad_checkpointing")  # the flags of Transformers and of timm


def is_checkpointed(module: nn.Module) -> bool:
    """Return whether a module of Transformers or timm is set to recompute its blocks in backward."""
    return any(getattr(module, flag, False) is True for flag in _CHECKPOINTING)


def get_state(value: Any) -> Any:
    """Return the state among what a block returns: all of it, or the first of a tuple, mapping or dataclass."""
    if isinstance(value, tuple | list):
        return value[0] if value else None
    if isinstance(value, Mapping):
        return next(iter(value.values()), None)
    if is_dataclass(value) and (names := [f.name for f in fields(value)]):
        return getattr(value, names[0])
    return value


def is_cache(x: Any) -> bool:
    """Return whether an argument of a block is a cache of keys and values, as those of Transformers are."""
    return not isinstance(x, type) and callable(getattr(x, "get_seq_length", None)) and callable(getattr(x, "update", None))


def replace_state(value: Any, state: Tensor) -> Any:
    """Return what a block returns with another state."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return cast(Any, value)._replace(**{value._fields[0]: state})
    if isinstance(value, tuple | list):
        return type(value)((state, *value[1:]))
    if isinstance(value, Mapping):
        changed = copy(cast(Any, value))
        changed[next(iter(value))] = state
        return changed
    if is_dataclass(value):
        return replace(cast(Any, value), **{fields(value)[0].name: state})
    return state
