"""Replace calls of a captured graph that consist of several operations by these, so that a plan can choose what each keeps.

The body of a checkpoint becomes calls of the graph itself: the plan says what is kept. Attention without a fused kernel, as on
a CPU with dropout, becomes two products with a softmax between them: if the softmax is kept, neither product runs again. A
fused kernel saves a mask of numbers, which every layer's attention makes from the same mask of booleans. As a call of its own
it is made again at next to no cost. A custom autograd function stays one call, of `call_custom_function`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Interpreter, Node
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.node import map_arg
from torch.utils._python_dispatch import TorchDispatchMode

from revzoo.runtime.compiling import leave_uncompiled
from revzoo.runtime.nested import map_tensors

_EXPANDED = "revzoo_expanded"  # in the meta of a graph
_NOT_COMPARED = ("aten.detach", "prim.")  # autograd calls the first where hooks are set; subclasses ask for the others


def expand_calls(graph: GraphModule) -> None:
    """Replace checkpoints by their bodies, attention that runs as several operations by these, and how custom functions save.

    Nothing is left to do in a graph that was expanded before.
    """
    if graph.meta.get(_EXPANDED):
        return
    graph.meta[_EXPANDED] = True
    _inline_checkpoints(graph)
    for node in list(graph.graph.nodes):
        if node.op == "call_function" and node.target is F.scaled_dot_product_attention:
            _expand_attention(graph, node)
        elif node.op == "call_function" and node.target is torch.ops.higher_order.autograd_function_apply:
            node.target = call_custom_function
    graph.recompile()
    _LazyGraphModule.force_recompile(graph)  # the first call of a lazy one runs global hooks of modules


def get_attribute(graph: GraphModule, path: str) -> Any:
    """Return what a dotted path names in a graph."""
    value: Any = graph
    for name in path.split("."):
        value = getattr(value, name)
    return value


def _inline_checkpoints(graph: GraphModule) -> None:
    """Replace checkpoints by their bodies. Besides, PyTorch 2.15 runs a checkpoint in a graph without rewinding its stream."""
    waiting = [node for node in graph.graph.nodes if _is_checkpoint(node)]
    numbers = count()
    while waiting:
        node = waiting.pop()
        body, *given = node.args
        inner = get_attribute(graph, str(body.target))
        values: dict[Node, Any] = {}
        arguments = iter(given)
        with graph.graph.inserting_before(node):
            for each in inner.graph.nodes:
                if each.op == "placeholder":
                    values[each] = next(arguments)
                elif each.op == "output":
                    (results,) = map_arg(each.args, values.__getitem__)
                else:
                    values[each] = copied = graph.graph.node_copy(each, values.__getitem__)
                    if each.op in ("get_attr", "call_module"):
                        copied.target = f"_checkpointed_{next(numbers)}"
                        setattr(graph, copied.target, get_attribute(inner, str(each.target)))
                    if _is_checkpoint(copied):
                        waiting.append(copied)
        for user in list(node.users):  # they pick single results
            user.replace_all_uses_with(results[user.args[1]])
            graph.graph.erase_node(user)
        graph.graph.erase_node(node)


def _is_checkpoint(node: Node) -> bool:
    return node.op == "call_function" and getattr(node.target, "__name__", "") == "tag_activation_checkpoint"


def _expand_attention(graph: GraphModule, node: Node) -> None:
    """Replace a call of attention by its parts, if these call the same operations. A fused kernel is one, and stays."""
    values: dict[Node, Any] = {each: each.meta.get("example_value") for each in (node, *node.all_input_nodes)}
    out = values[node]
    if not all(type(t) is FakeTensor and t.dtype in (out.dtype, torch.bool) for t in values.values()) or not out.requires_grad:
        return  # under autocast, for example, it returns another dtype
    args: Any = map_arg(node.args, values.__getitem__)
    kwargs: Any = dict(map_arg(node.kwargs, values.__getitem__))
    with out.fake_mode, torch.enable_grad(), _Operations() as expected:
        F.scaled_dot_product_attention(*args, **kwargs)
    for attend in (_attend, _attend_fused):
        calls = _Calls()
        with out.fake_mode, torch.enable_grad(), _Operations() as operations:
            attend(calls.call, *args, **kwargs)
        if operations.called == expected.called:
            break
    else:
        return
    made = {id(values[each]): each for each in node.all_input_nodes}
    with graph.graph.inserting_before(node):
        for function, given, options, result in calls.made:
            part = graph.graph.call_function(function, tuple(made.get(id(each), each) for each in given), options)
            part.meta = {key: value for key, value in node.meta.items() if key != "example_value"}
            made[id(result)] = part
    node.replace_all_uses_with(part)
    graph.graph.erase_node(node)


class _Calls:
    """Calls functions and notes them: function, arguments, keyword arguments, which are no tensors, and result."""

    def __init__(self) -> None:
        self.made: list[tuple[Callable[..., Tensor], tuple[Any, ...], dict[str, Any], Tensor]] = []

    def call(self, function: Callable[..., Tensor], *args: Any, **options: Any) -> Tensor:
        result = function(*args, **options)
        self.made.append((function, args, options, result))
        return result


def _attend(
    call: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> None:
    """Call the parts of attention one by one, as PyTorch does where no fused kernel takes the arguments."""
    if enable_gqa:
        return
    factor = math.sqrt(abs(1 / math.sqrt(query.shape[-1]) if scale is None else scale))
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        attn_mask = call(convert_mask, attn_mask, query.dtype)
    query = call(multiply, query, factor)
    if is_causal:
        attn_mask = call(make_causal_mask, query, key)
    scores = call(torch.matmul, query, call(multiply, call(torch.transpose, key, -2, -1), factor))
    if attn_mask is not None:
        scores = call(torch.add, scores, attn_mask)
    weights = call(torch._safe_softmax, scores, -1)
    if dropout_p:
        weights = call(F.dropout, weights, dropout_p)
    call(torch.matmul, weights, value)


def _attend_fused(
    call: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *rest: Any,
    **options: Any,
) -> None:
    """Call what makes numbers of a mask of booleans, and attention with these."""
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        mask = call(convert_mask, attn_mask, query.dtype)
        call(F.scaled_dot_product_attention, query, key, value, mask, *rest, **options)


def multiply(tensor: Tensor, factor: float) -> Tensor:
    """Return a tensor times a number, by the operation that attention calls."""
    return torch.ops.aten.mul.Scalar(tensor, factor)


def convert_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what attention adds to its scores for a mask that is False where nothing is attended to."""
    return torch.where(mask, 0.0, torch.scalar_tensor(-math.inf, dtype=dtype, device=mask.device))


def make_causal_mask(query: Tensor, key: Tensor) -> Tensor:
    """Return what attention adds to its scores so that no position attends to a later one."""
    size = query.shape[-2], key.shape[-2]
    return convert_mask(torch.ones(size, dtype=torch.bool, device=query.device).tril(), query.dtype)


def call_custom_function(
    forward: GraphModule,
    backward: GraphModule,
    *inputs: Any,
    saved_for_backward_idx: tuple[int, ...] | None = None,
    non_differentiable_idx: tuple[int, ...] = (),
    dirty_idx: tuple[int, ...] = (),
    args_tensor_mask: tuple[bool, ...] | None = None,
) -> Any:
    """Run a custom function so that autograd frees what the function saves, and hooks on saved tensors see it.

    PyTorch's own call keeps the saved tensors in a class that is part of a reference cycle. Arguments are those of
    `torch.ops.higher_order.autograd_function_apply`.

    Args:
        forward: returns the function's results and what it saves.
        backward: takes the gradients of the results, then what was saved, and returns the gradients of the inputs.
        inputs: of the function.
        saved_for_backward_idx: which of what is saved went through `ctx.save_for_backward`; the rest are attributes of `ctx`.
            PyTorch 2.10 does not tell: all.
        non_differentiable_idx: which results have no gradient.
        dirty_idx: which results are inputs that were changed.
        args_tensor_mask: given by PyTorch 2.10 alone, whose forward and backward have a place for `ctx`.
    """
    ctx = () if args_tensor_mask is None else (None,)
    call = _CustomCall(forward, backward, saved_for_backward_idx, non_differentiable_idx, dirty_idx, ctx)
    return _CustomFunction.apply(call, *inputs)


@dataclass
class _CustomCall:
    """One call of a custom function; `saved` passes from its forward to its context."""

    forward: GraphModule
    backward: GraphModule
    checked: tuple[int, ...] | None
    non_differentiable: tuple[int, ...]
    dirty: tuple[int, ...]
    ctx: tuple[None, ...]
    saved: list[Any] = field(default_factory=list)


class _CustomFunction(torch.autograd.Function):
    @staticmethod
    def forward(call: _CustomCall, *inputs: Any) -> Any:
        results, saved = Interpreter(call.forward).run(*call.ctx, *inputs)
        call.saved = list(saved)
        return results

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        call: _CustomCall = inputs[0]
        saved, call.saved = call.saved, []
        results = output if isinstance(output, tuple | list) else [output]
        if call.dirty:
            ctx.mark_dirty(*(results[i] for i in call.dirty))
        if call.non_differentiable:
            ctx.mark_non_differentiable(*(results[i] for i in call.non_differentiable))
        checked = range(len(saved)) if call.checked is None else call.checked
        ctx.places = [i for i, each in enumerate(saved) if i in checked and isinstance(each, Tensor)]
        ctx.save_for_backward(*(saved[i] for i in ctx.places))
        for i in ctx.places:
            saved[i] = None
        ctx.attributes, ctx.body, ctx.first = saved, call.backward, call.ctx

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        saved = list(ctx.attributes)
        for i, each in zip(ctx.places, ctx.saved_tensors, strict=True):
            saved[i] = each
        out = Interpreter(ctx.body).run(*ctx.first, *gradients, *saved)
        out = out if isinstance(out, tuple | list) else [out]
        return None, *out, *[None] * (len(ctx.needs_input_grad) - 1 - len(out))


class _Operations(TorchDispatchMode):
    """Notes the operations that are called, with their arguments and the layout of their results.

    Keywords tell no more than that: dtype, device, memory format.
    """

    def __init__(self) -> None:
        super().__init__()
        self.called: list[str] = []

    @leave_uncompiled
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not str(func).startswith(_NOT_COMPARED):
            self.called.append(f"{func} {map_tensors(lambda t: (t.dtype, t.shape, t.stride()), (args, out))}")
        return out
