"""Replacing the call of a module, and back, while the module stays what it is: its keys, hooks, parameters and class."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from weakref import ref

from torch import nn

from revzoo.runtime.compiling import exclude_from_compilation
from revzoo.runtime.transforms import warn_user

Runner = Callable[..., Any]


class _ReplacedCall:
    """What stands in a module in place of its own call."""

    def __init__(self, module: nn.Module, call: Runner, undo: Callable[[], object]):
        self._module, self._call, self._undo = ref(module), call, undo
        # A hook that does nothing: a module without any is compiled into its caller past what stands here.
        self._hook = module.register_forward_pre_hook(nullcontext().__exit__)

    @exclude_from_compilation
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def undo(self) -> None:
        self._hook.remove()
        self._undo()

    def __del__(self) -> None:
        module = self._module()
        if module is not None and module._compiled_call_impl is not None and not is_replaced(module):
            self.undo()
            warn_user(
                f"{type(module).__name__} has no plan any more, since its compile() was called, which replaces its call. Plan "
                "a module that is not compiled; what is compiled around it may be."
            )


def replace_call(module: nn.Module, call: Runner, undo: Callable[[], object]) -> None:
    """Run `call` in place of the module's own call from now on. It may call `module._call_impl`, which is that.

    Args:
        module: any.
        call: takes what the module takes.
        undo: what else `restore_call` has to do.
    """
    module._compiled_call_impl = _ReplacedCall(module, call, undo)


def restore_call(module: nn.Module) -> None:
    """Undo `replace_call`, if it was called."""
    if isinstance(replaced := module._compiled_call_impl, _ReplacedCall):
        module._compiled_call_impl = None
        replaced.undo()


def is_replaced(module: nn.Module) -> bool:
    """Return whether calls of the module run through `replace_call`."""
    return isinstance(module._compiled_call_impl, _ReplacedCall)
