"""What the runtime has to know of torch.compile, without importing the compiler, which takes longer than PyTorch itself."""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn
from torch._C._dynamo import eval_frame  # the part in C, which is there before the compiler is imported

from revzoo.runtime.transforms import warn_user

P = ParamSpec("P")
R = TypeVar("R")

_COMPILER = "torch._dynamo"
_SKIP, _DEFAULT = eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT
_num_captures = 0  # of graphs for plans, at present


around: ContextVar[Any] = ContextVar("around", default=None)  # what compiles the code around a call that runs uncompiled


def exclude_from_compilation(function: Callable[P, R]) -> Callable[P, R]:
    """Run a function uncompiled also inside a model that is compiled as a whole.

    Needed by what records a call: its second run happens in backward, outside the compiled region. What it calls by
    `call_as_around` is compiled, in both runs.
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling() or eval_frame.get_eval_frame_callback() is not None:  # traced now, or about to be
            return call_uncompiled(function, *args, **kwargs)
        return function(*args, **kwargs)

    return call


def call_uncompiled(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Return function(*args, **kwargs), out of reach of the compiler."""
    compiler = eval_frame.set_eval_frame(None)
    token = around.set(compiler)
    try:
        return function(*args, **kwargs)
    finally:
        around.reset(token)
        eval_frame.set_eval_frame(compiler)


@cache
def warn_of_uncompiled() -> None:
    """Say once that a step runs uncompiled although the code around it is compiled."""
    warn_user(
        "Steps of a reversible chain run uncompiled inside of torch.compile: those of reversible_ that are cut or split, and "
        "those that keep results of their parts (keep=, choices of routers, mode 'selective' of what is not traced whole)."
    )


def call_as_around(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Return function(*args, **kwargs), compiled by what compiles the code around an uncompiled call, if anything does."""
    if torch.compiler.is_compiling() or (compiler := around.get()) is None or getattr(function, "compiles_inside", False):
        return function(*args, **kwargs)
    before = eval_frame.set_eval_frame(compiler)
    try:
        return _enter(function, *args, **kwargs)
    finally:
        eval_frame.set_eval_frame(before)


def _enter(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    return function(*args, **kwargs)  # of the same code for all, so that what is alike shares a graph


def leave_uncompiled(function: Callable[P, R]) -> Callable[P, R]:
    """Make the compiler pass over a function and all that it calls.

    As `torch.compiler.disable`, but for functions that are never compiled into a caller, such as handlers of a dispatch mode:
    nothing is wrapped around them, which would take ten microseconds for each operation.
    """
    eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(_SKIP, _SKIP))
    return function


# As torch.compiler.disable, which imports the compiler.
eval_frame.set_code_exec_strategy(call_uncompiled.__code__, eval_frame._FrameExecStrategy(_SKIP, _DEFAULT))
_WHY = "it decides what autograd keeps; each step in it is compiled by itself"
vars(call_uncompiled).update(_torchdynamo_disable=True, _torchdynamo_disable_msg=_WHY)


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
