"""Calling a module through its captured graphs, while it stays what it is.

`torch.compile` captures the graphs with a backend of ours, checks its guards at every call, and hands over other graphs where
shapes, dtypes or flags are others. Keys, hooks, parameters and the class of the module are as before.
"""

import hashlib
import warnings
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

Runner = Callable[..., Any]
Backend = Callable[[GraphModule, Sequence[Any]], Runner]

_MOST_GRAPHS = 1024  # of one piece of code, such as the forward of a class that is not captured in one graph with its caller's


def capture_calls(module: nn.Module, backend: Backend) -> Runner:
    """Return what calls the module through `backend`: a graph and inputs in, what runs it out."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)

    # The compiler counts captures by code object and gives up after a few, so every module gets one of its own.
    fresh = FunctionType(call.__code__.replace(), call.__globals__, "call", closure=call.__closure__)
    runner: Runner = torch.compile(fresh, backend=backend, dynamic=False)
    patched: Runner = torch._dynamo.config.patch(
        optimize_ddp=False,  # under DistributedDataParallel the compiler would cut the graph at its buckets
        recompile_limit=_MOST_GRAPHS,
        accumulated_recompile_limit=_MOST_GRAPHS,
    )(runner)
    has_captured = False

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal has_captured
        if has_captured:
            return patched(*args, **kwargs)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")  # the compiler asks for it
            results = patched(*args, **kwargs)
        has_captured = True
        return results

    return run


def compute_digest(graph: GraphModule, inputs: Sequence[Any]) -> str:
    """Return a hash of a graph's calls with their arguments, and of its inputs' shapes, dtypes and need of gradients."""
    calls = [(node.op, node.name, _describe(node.target), repr(node.args), repr(node.kwargs)) for node in graph.graph.nodes]
    given = [(tuple(t.shape), str(t.dtype), t.requires_grad) if isinstance(t, Tensor) else repr(t) for t in inputs]
    return hashlib.sha256(repr((calls, given)).encode()).hexdigest()


def _describe(target: Any) -> str:
    return target if isinstance(target, str) else getattr(target, "__qualname__", type(target).__name__)
