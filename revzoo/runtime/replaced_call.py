"""Replacing the call of a module, and back, while the module stays what it is: its keys, hooks, parameters and class."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from revzoo.runtime.compiling import exclude_from_compilation

Runner = Callable[..., Any]


class _ReplacedCall:
    """What stands in a module in place of its own call. The compiler goes past it: what it compiles is the module's own."""

    def __init__(self, module: nn.Module, call: Runner):
        self._call = exclude_from_compilation(call)
        self._own = module._call_impl

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return (self._own if torch.compiler.is_compiling() else self._call)(*args, **kwargs)


def replace_call(module: nn.Module, call: Runner) -> None:
    """Run `call` in place of the module's own call from now on, unless it is compiled.

    Args:
        module: any.
        call: takes what the module takes. It may call `module._call_impl`, which is the module's own.
    """
    if module._compiled_call_impl is None:
        module._compiled_call_impl = _ReplacedCall(module, call)


def restore_call(module: nn.Module) -> None:
    """Undo `replace_call`, if it was called."""
    if is_replaced(module):
        module._compiled_call_impl = None


def is_replaced(module: nn.Module) -> bool:
    """Return whether calls of the module run through `replace_call`."""
    return isinstance(module._compiled_call_impl, _ReplacedCall)
