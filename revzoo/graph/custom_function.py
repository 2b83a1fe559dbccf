"""Calls of custom autograd functions in a captured graph, with what they save where autograd frees it.

PyTorch runs a captured function through a class that it makes for the call and that holds what is saved. A class is part of a
cycle: its tensors stay until garbage is collected. And hooks on saved tensors do not see them, so that none could be recovered.
"""

from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter


def call_custom_function(
    forward: GraphModule,
    backward: GraphModule,
    *inputs: Any,
    saved_for_backward_idx: tuple[int, ...] = (),
    non_differentiable_idx: tuple[int, ...] = (),
    dirty_idx: tuple[int, ...] = (),
) -> Any:
    """Return what a custom function returns. Arguments are those of `torch.ops.higher_order.autograd_function_apply`.

    Args:
        forward: returns the function's results and what it saves.
        backward: takes the gradients of the results, then what was saved, and returns the gradients of the inputs.
        inputs: of the function.
        saved_for_backward_idx: which of what is saved went through `ctx.save_for_backward`; the rest are attributes of `ctx`.
        non_differentiable_idx: which results have no gradient.
        dirty_idx: which results are inputs that were changed.
    """
    call = _Call(forward, backward, frozenset(saved_for_backward_idx), non_differentiable_idx, dirty_idx)
    return _CustomFunction.apply(call, *inputs)


class _Call:
    """One call of a custom function; `saved` passes from its forward to its context."""

    def __init__(
        self,
        forward: GraphModule,
        backward: GraphModule,
        checked: frozenset[int],
        non_differentiable: tuple[int, ...],
        dirty: tuple[int, ...],
    ):
        self.forward, self.backward, self.checked = forward, backward, checked
        self.non_differentiable, self.dirty = non_differentiable, dirty
        self.saved: list[Any] = []


class _CustomFunction(torch.autograd.Function):
    @staticmethod
    def forward(call: _Call, *inputs: Any) -> Any:
        results, saved = Interpreter(call.forward).run(*inputs)
        call.saved = list(saved)
        return results

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        call: _Call = inputs[0]
        saved, call.saved = call.saved, []
        results = output if isinstance(output, tuple | list) else [output]
        if call.dirty:
            ctx.mark_dirty(*(results[i] for i in call.dirty))
        if call.non_differentiable:
            ctx.mark_non_differentiable(*(results[i] for i in call.non_differentiable))
        ctx.places = [i for i, each in enumerate(saved) if i in call.checked and isinstance(each, Tensor)]
        ctx.save_for_backward(*(saved[i] for i in ctx.places))
        for i in ctx.places:
            saved[i] = None
        ctx.attributes, ctx.body = saved, call.backward

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        saved = list(ctx.attributes)
        for i, each in zip(ctx.places, ctx.saved_tensors, strict=True):
            saved[i] = each
        out = Interpreter(ctx.body).run(*gradients, *saved)
        return None, *(out if isinstance(out, tuple | list) else [out])
