"""Calling a function out of reach of the compiler. Imported by `compiling.py`, and only once there is a compiler."""

from collections.abc import Callable
from typing import Any

import torch


@torch.compiler.disable(reason="it decides what autograd keeps; compile each step instead: step.compile()")
def call_uncompiled(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return function(*args, **kwargs)."""
    return function(*args, **kwargs)
