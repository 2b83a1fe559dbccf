"""What the runtime has to know of torch.compile, without importing the compiler, which takes longer than PyTorch itself."""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn
from torch._C._dynamo import eval_frame  # the part in C, which is there before the compiler is imported

P = ParamSpec("P")
R = TypeVar("R")
FunctionCompiler = Callable[[Callable[P, R]], Callable[P, R]]

_COMPILER = "torch._dynamo"
_num_captures = 0  # of graphs for plans, at present


def exclude_from_compilation(function: Callable[P, R]) -> Callable[P, R]:
    """Run a function uncompiled also inside a model that is compiled as a whole.

    Needed by what records a call: its second run happens in backward, outside the compiled region, with the uncompiled f, and
    a compiled first run would have saved other tensors. A step compiled by itself (`step.compile()`) runs compiled both times.
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling() or eval_frame.get_eval_frame_callback() is not None:  # traced now, or about to be
            from revzoo.runtime.uncompiled import call_uncompiled

            return call_uncompiled(function, *args, **kwargs)
        return function(*args, **kwargs)

    return call


def leave_uncompiled(function: Callable[P, R]) -> Callable[P, R]:
    """Make the compiler pass over a function and all that it calls.

    As `torch.compiler.disable`, but for functions that are never compiled into a caller, such as handlers of a dispatch mode:
    nothing is wrapped around them, which would take ten microseconds for each operation.
    """
    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))
    return function


def is_exporting() -> bool:
    """Return whether torch.export is tracing.

    `torch.compiler.is_exporting` does too, but that of PyTorch 2.11 also returns True under torch.compile.
    """
    return torch.compiler._is_exporting_flag


def is_traced() -> bool:
    """Return whether torch.compile is tracing for a graph that it compiles; a plan captures graphs that run call by call."""
    return torch.compiler.is_compiling() and not is_exporting() and not _num_captures


@contextmanager
def capturing() -> Iterator[None]:
    """Say inside that a plan captures graphs."""
    global _num_captures
    _num_captures += 1
    try:
        yield
    finally:
        _num_captures -= 1


def is_compiled(function: Callable[..., Any]) -> bool:
    """Return whether a function, or a module in it, was compiled by itself."""
    return isinstance(function, nn.Module) and are_compiled(function.modules())


def are_compiled(modules: Iterable[nn.Module]) -> bool:
    """Return whether one of the modules was compiled by itself."""
    compiler = sys.modules.get(_COMPILER)
    if compiler is None:
        return False
    return any(m._compiled_call_impl is not None or isinstance(m, compiler.OptimizedModule) for m in modules)


def find_selective_call(function: Callable[..., Any]) -> Callable[..., Any] | None:
    """Return the call of a compiled step for mode `selective` (`model/compiled_step.py`); None if it has none."""
    return getattr(getattr(function, "_compiled_call_impl", None), "call_selectively", None)


def find_function_compiler(function: Callable[..., Any]) -> FunctionCompiler[..., Any] | None:
    """Return what compiles the arithmetic between steps like the step itself; None for a step that is not compiled."""
    compiled = getattr(function, "_compiled_call_impl", None)
    compiler: FunctionCompiler[..., Any] | None = getattr(compiled, "compile_function", None)
    return None if torch.compiler.is_compiling() else compiler
