"""Steps that are compiled one by one, all of the same kind into one graph.

What is compiled is not a step but the call of one, with the step as an argument. Dynamo compares what a graph was made for
(classes, shapes, flags) with the step that is called, so steps that agree in all of this share one graph.
`step.compile()` shares graphs as well, but at most 8 for each class, and passes over an `nn.Sequential` on PyTorch 2.11.

What a compiled call saves is chosen by the compiler's partitioner; a dispatch mode cannot change it afterwards. So a step has a
second graph for mode `selective`, made when it is first needed. There the call is a checkpoint whose policy saves the outputs
of compute-intensive operations, those of `selective.py`; backward, a part of the same graph, computes the rest again. Nothing
is recorded for such a call: what its graph saves is what the mode keeps.
"""

import logging
import warnings
from collections.abc import Callable, Sequence
from functools import cache, partial
from inspect import signature
from typing import Any

import torch
import torch._dynamo
from torch import nn
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from revzoo.runtime.compiling import FunctionCompiler
from revzoo.runtime.operations import is_compute_intensive

# PyTorch warns that a checkpoint with a policy must hold no in-place operations. The policy here is applied to a whole graph,
# after the compiler has removed them.
logging.getLogger("torch._higher_order_ops.wrap").addFilter(lambda record: "context_fn is passed" not in record.getMessage())

_GRAPHS_PER_STEP = 8  # Dynamo's limit for one function, which here is that of all steps


def compile_calls(steps: Sequence[nn.Module], **options: Any) -> None:
    """Compile modules in place as `nn.Module.compile` does, but each kind of module once.

    Args:
        steps: the modules. They are compiled when they are first called.
        **options: arguments of `torch.compile`.
    """
    limit = _GRAPHS_PER_STEP * len(steps)
    if "recompile_limit" in signature(torch.compile).parameters:
        options = {"recompile_limit": limit, **options}
    else:  # PyTorch 2.11 has one limit for all functions
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, limit)
    plain = torch.compile(_call, **options)
    selective = torch.compile(_call_selectively, **{**options, "fullgraph": True})
    # Not `mode`: states outlive the next call, which CUDA graphs do not allow. Sizes and factors are constants: as variables,
    # factors could round differently.
    compile_function = cache(partial(torch.compile, backend=options.get("backend", "inductor"), dynamic=False))
    for step in steps:
        step._compiled_call_impl = CompiledStep(step, plain, selective, compile_function)


class CompiledStep:
    """What `nn.Module.__call__` runs in place of a compiled module.

    Args:
        step: the module.
        plain: a compiled function, called with the module and its arguments.
        selective: another one, which keeps for backward what mode `selective` keeps.
        compile_function: compiles the arithmetic on the grid.
    """

    def __init__(
        self,
        step: nn.Module,
        plain: Callable[..., Any],
        selective: Callable[..., Any],
        compile_function: FunctionCompiler[..., Any],
    ):
        self._step = step
        self._plain = plain
        self._selective = selective
        self.compile_function = compile_function
        self._is_one_graph = True  # until the compiler says otherwise

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._plain(self._step, *args, **kwargs)

    def call_selectively(self, *args: Any) -> Any:
        """Return the output of the step; NotImplemented where the step is no single graph, or nothing is compiled now."""
        if not self._is_one_graph or torch._C._len_torch_dispatch_stack():  # Dynamo compiles nothing in a dispatch mode
            return NotImplemented
        try:
            return self._selective(self._step, *args)
        except (TorchDynamoException, FailOnRecompileLimitHit) as error:
            self._is_one_graph = False
            reason = str(error).strip().partition("\n")[0]
            warnings.warn(
                f"A {type(self._step).__name__} cannot be compiled as one graph, so in mode 'selective' it keeps only its "
                f"input, as in mode 'recompute': {reason}",
                stacklevel=2,
            )
            return NotImplemented


def _call(step: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return step._call_impl(*args, **kwargs)


def _call_selectively(step: nn.Module, *args: Any) -> Any:
    if not torch.compiler.is_compiling():  # PyTorch's own checkpoint would run, without the tripwire
        return NotImplemented
    return checkpoint(step._call_impl, *args, use_reentrant=False, context_fn=_CONTEXTS)


def _choose_policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Return whether the results of an operation are saved.

    Those of operations outside ATen always are: they may draw random numbers unseen, and nothing compares a compiled second run
    with the first.
    """
    is_cheap = getattr(operation, "namespace", None) == "aten" and not is_compute_intensive(operation)
    return CheckpointPolicy.PREFER_RECOMPUTE if is_cheap else CheckpointPolicy.MUST_SAVE


_CONTEXTS = partial(create_selective_checkpoint_contexts, _choose_policy)
