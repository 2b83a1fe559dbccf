"""Replacing the call of a module, and back, while the module stays what it is: its keys, hooks, parameters and class."""

from collections.abc import Callable
from typing import Any

from torch import nn

from revzoo.runtime.compiling import exclude_from_compilation

Runner = Callable[..., Any]


class _ReplacedCall:
    """What stands in a module in place of its own call."""

    def __init__(self, call: Runner, undo: Callable[[], object]):
        self._call = call
        self.undo = undo

    @exclude_from_compilation
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)


def replace_call(module: nn.Module, call: Runner, undo: Callable[[], object]) -> None:
    """Run `call` in place of the module's own call from now on. It may call `module._call_impl`, which is that.

    Args:
        module: any.
        call: takes what the module takes.
        undo: what else `restore_call` has to do.
    """
    module._compiled_call_impl = _ReplacedCall(call, undo)


def restore_call(module: nn.Module) -> None:
    """Undo `replace_call`, if it was called."""
    if isinstance(replaced := module._compiled_call_impl, _ReplacedCall):
        module._compiled_call_impl = None
        replaced.undo()


def is_replaced(module: nn.Module) -> bool:
    """Return whether calls of the module run through `replace_call`."""
    return isinstance(module._compiled_call_impl, _ReplacedCall)
