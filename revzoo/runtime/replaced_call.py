"""Replacing the call of a module, and back, while the module stays what it is: its keys, hooks, parameters and class."""

from collections.abc import Callable
from typing import Any

from torch import nn

Runner = Callable[..., Any]


class _ReplacedCall:
    """What stands in a module in place of its own call."""

    def __init__(self, call: Runner):
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)


def replace_call(module: nn.Module, call: Runner) -> None:
    """Run `call` in place of the module's own call from now on. It may call `module._call_impl`, which is that.

    Args:
        module: any.
        call: takes what the module takes.
    """
    module._compiled_call_impl = _ReplacedCall(call)


def restore_call(module: nn.Module) -> None:
    """Undo `replace_call`, if it was called."""
    if is_replaced(module):
        module._compiled_call_impl = None


def is_replaced(module: nn.Module) -> bool:
    """Return whether calls of the module run through `replace_call`."""
    return isinstance(module._compiled_call_impl, _ReplacedCall)
