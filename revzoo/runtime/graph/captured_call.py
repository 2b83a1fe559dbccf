"""Replacing the call of a module by its captured graph, and back, while the module stays what it is.

`torch.compile` captures the graph with a backend of ours, checks its guards at every call, and hands over another graph where
shapes, dtypes or flags are others. Keys, hooks, parameters and the class of the module are as before.
"""

from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

Runner = Callable[..., Any]
Backend = Callable[[GraphModule, Sequence[Any]], Runner]


def capture_calls(module: nn.Module, backend: Backend) -> Runner:
    """Return what calls the module through `backend`: its graph and inputs in, what runs it out."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)

    # The compiler counts captures by code object and gives up after a few, so every module gets one of its own.
    fresh = FunctionType(call.__code__.replace(), call.__globals__, "call", closure=call.__closure__)
    runner: Runner = torch.compile(fresh, backend=backend, dynamic=False)
    # Under DistributedDataParallel the compiler would cut the graph at its buckets.
    whole: Runner = torch._dynamo.config.patch(optimize_ddp=False)(runner)
    return whole


class _ReplacedCall:
    """What stands in a module in place of its own call."""

    def __init__(self, call: Runner):
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)


def replace_call(module: nn.Module, backend: Backend) -> None:
    """Run every call of the module through `backend` from now on."""
    module._compiled_call_impl = _ReplacedCall(capture_calls(module, backend))


def restore_call(module: nn.Module) -> None:
    """Undo `replace_call`, if it was called."""
    if is_replaced(module):
        module._compiled_call_impl = None


def is_replaced(module: nn.Module) -> bool:
    """Return whether calls of the module run through `replace_call`."""
    return isinstance(module._compiled_call_impl, _ReplacedCall)
