"""Modules, batches and losses that cannot be planned: what is said about them, and what to type instead."""

import inspect
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn
from torch._dynamo.eval_frame import OptimizedModule
from torch._dynamo.exc import TorchRuntimeError
from torch.fx import GraphModule
from torch.nn.modules.module import _global_backward_hooks, _global_backward_pre_hooks
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from revzoo.analysis.chains import find_block_chains
from revzoo.analysis.dry_run import call, require_module
from revzoo.analysis.fake_tensors import silence_failures
from revzoo.errors import InputError, join_names
from revzoo.format import format_dtype
from revzoo.graph.atoms import name_call
from revzoo.runtime.nested import tensors_in
from revzoo.runtime.replaced_call import is_replaced

_OPERATOR = re.compile(r"HigherOrderOperator (\w+)")
_REASON = re.compile(r"got \w+\(['\"](.*)['\"]\)")  # of a failure, in the compiler's words


def unwrap(module: nn.Module) -> nn.Module:
    """Return the module that torch.compile was given, or the module itself. Raise InputError if it is none."""
    require_module(module)
    return module._orig_mod if isinstance(module, OptimizedModule) else module


def require_plannable(module: nn.Module, batch: Any) -> None:
    """Raise InputError if a part of the module is compiled apart, runs with a plan, or has blocks that were made reversible.

    Also if nothing can be differentiated: in inference mode, or with tensors that were made there.
    """
    if path := next(iter(find_block_chains(module)), None):
        raise InputError(
            f"The blocks of {path} were made reversible by reversible_: what is planned are their modes, with "
            "revzoo.plan(module, batch, budget). For a plan of its graph make it ordinary again: revzoo.ordinary_(module)."
        )
    require_unplanned(module)
    tensors = [*module.parameters(), *module.buffers(), *tensors_in(batch)]
    if torch.is_inference_mode_enabled() or any(t.is_inference() for t in tensors):
        raise InputError(
            "Nothing is differentiated in torch.inference_mode(), so that there is nothing to plan. Received: a call inside of "
            "it, or tensors that were made there. Leave it, and clone such tensors: t.clone()."
        )


def require_unplanned(module: nn.Module, may_have_plan: bool = False) -> None:
    """Raise InputError if a part of the module has a plan, or is what torch.compile or torch.jit has made of another module.

    Args:
        module: the module.
        may_have_plan: whether it may have one itself.
    """
    for name, each in module.named_modules():
        if is_replaced(each):
            path = f"module.{name}" if name else "module"
            if each is not module or not may_have_plan:
                raise InputError(f"{path} has a plan already. Call revzoo.release({path}) first.")
        elif isinstance(each, OptimizedModule | torch.jit.ScriptModule):
            raise InputError(
                f"Only the code of a module can be planned, not what torch.jit has made of it, or torch.compile of a part. "
                f"Received: compiled {name or 'module'}. Give it as it was, and compile the part in place: part.compile()."
            )


@contextmanager
def uncompiled(module: nn.Module) -> Iterator[None]:
    """Run a module as if neither it nor a part of it were compiled in place."""
    calls = {each: each._compiled_call_impl for each in module.modules() if each._compiled_call_impl is not None}
    for each in calls:
        each._compiled_call_impl = None
    try:
        yield
    finally:
        for each, own in calls.items():
            each._compiled_call_impl = own


def require_arguments(module: nn.Module, batch: Any) -> None:
    """Raise InputError if forward does not take as many arguments, or of these names."""
    if module._forward_pre_hooks:  # they may give it others
        return
    try:
        signature = inspect.signature(module.forward)
    except (TypeError, ValueError):
        return
    try:
        call(signature.bind, batch)
    except TypeError as error:
        raise InputError(
            f"The forward of {type(module).__name__} cannot be called with this batch: {error}. A batch is a tensor, a tuple "
            "or list of positional arguments, or a mapping of keyword arguments."
        ) from error


def describe_backward_hooks(module: nn.Module) -> Iterator[str]:
    """Yield what to do about the hooks of a module's layers that torch.compile does not follow, if there are any."""
    hooked = (name or "the module" for name, each in module.named_modules() if each._backward_hooks or each._backward_pre_hooks)
    everywhere = ["every module"] if _global_backward_hooks or _global_backward_pre_hooks else []
    if names := [*hooked, *everywhere]:
        yield (
            f"torch.compile captures no graph across the full backward hooks of {join_names(names, most=4)}. Remove them, or "
            "use forward hooks that call output.register_hook."
        )


@contextmanager
def explain_failures(module: nn.Module, batch: Any) -> Iterator[None]:
    """Raise InputError in place of the error that PyTorch raises while it captures an operation that does not fit.

    Args:
        module: the module.
        batch: with which it may be called.
    """
    try:
        with silence_failures():
            yield
    except NotImplementedError as error:
        if not (operator := _OPERATOR.search(str(error))):
            raise
        raise InputError(
            f"The forward of {type(module).__name__} calls the higher-order operator {operator[1]}, which runs code of its own "
            "that no plan can look into. Plan a submodule that calls none."
        ) from error
    except TorchRuntimeError as error:
        reason = _REASON.search(str(error))
        words = (reason[1] if reason else str(error).splitlines()[0]).rstrip(".")
        given = ", ".join(f"{list(t.shape)} {format_dtype(t.dtype)}" for t in tensors_in(batch))
        where, remedy = f"with this batch ({given})", "Give one that module(batch) takes."
        with suppress(Exception), torch.no_grad():
            call(module, batch)
            where = "under torch.compile, though not without"
            remedy = "It may do something else where torch.compiler.is_compiling(). Plan a submodule that can be compiled."
        raise InputError(f"The forward of {type(module).__name__} fails {where}: {words}. {remedy}") from error


def require_followable(module: nn.Module, graph: GraphModule) -> None:
    """Raise InputError if a captured graph has calls whose results have no memory to follow, or sizes that depend on values.

    Raised before the graph runs, since one that stops on its way leaves PyTorch inside a transform or in inference mode.
    """
    graphs = (each for each in graph.modules() if isinstance(each, GraphModule))
    for node in (node for each in graphs for node in each.graph.nodes):
        path, _, function = (name := name_call(node)).rpartition(" (")
        if function.rstrip(")").endswith(("_increment_nesting", "_enter_inference_mode")):
            raise InputError(
                f"The forward of {type(module).__name__} uses vmap, grad or another transform of torch.func, or "
                f"torch.inference_mode (in {path or 'itself'}), which cannot be planned. Plan a submodule that uses none."
            )
        if any(t.is_nested for t in tensors_in(node.meta.get("example_value"))):
            raise InputError(
                f"The sizes of nested tensors depend on values, so {type(module).__name__} cannot be planned. Received: a "
                f"nested tensor in {'its batch' if node.op == 'placeholder' else name}. Plan a submodule that has none, or pad "
                "it to a dense one."
            )


def describe_modes() -> Iterator[str]:
    """Yield what to do about a dispatch mode under which the compiler captures nothing, if there is one."""
    if modes := [type(mode).__name__ for mode in _get_current_dispatch_mode_stack() if not mode.ignore_compile_internals()]:
        yield (
            f"torch.compile captures no graph under the dispatch mode {join_names(modes)}. Leave it, or let its class have "
            "a method ignore_compile_internals that returns True."
        )


def require_results(module: nn.Module, outputs: Any) -> None:
    """Raise InputError if nothing that the module returns has a gradient."""
    tensors = list(tensors_in(outputs))
    if not tensors:
        raise InputError(
            f"The forward of {type(module).__name__} returns no tensor, so there is no backward to plan. Received: "
            f"{type(outputs).__name__}. Return what the loss is computed from."
        )
    if not any(t.requires_grad for t in tensors):
        raise InputError(
            f"Nothing that the forward of {type(module).__name__} returns depends on a parameter that requires a gradient. "
            "Look for .detach(), .item() and torch.no_grad() in it."
        )
