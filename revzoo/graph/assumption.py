"""Answers for libraries that ask for the values of tensors while their code is captured, and do without an answer there.

Transformers asks whether a mask of padding is all ones, and whether positions start anew in the middle of a text. Where neither
is so, attention needs no mask; while code is captured, no value can be read, so it gets one of (batch, 1, tokens, tokens). Here
such a question is answered with what leads to no mask, and computed before the graph at every call. Where the answer is wrong,
the call is captured again without answers.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, GraphModule, Node
from torch.utils._python_dispatch import _disable_current_modes

from revzoo.analysis.fake_tensors import find_values
from revzoo.device import has_value

_MODULE = "transformers.masking_utils"
_MASK_QUESTIONS = "_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa"
_PACKING_QUESTION = "find_packed_sequence_indices"

_lock = Lock()
_num_inside = 0  # calls that stand in for the library's functions
_replaced = dict[str, Any]()  # these functions
_KNOWN = {  # operations that what is assumed is computed by; others might change something, or draw random numbers
    *("_note", "arange", "ones", "getitem", "view", "reshape", "expand", "unsqueeze", "to", "bool", "long"),
    *("eq", "__eq__", "ne", "add", "sub", "diff", "cumsum", "all"),
}
_WRITING = {"setitem", *(f"i{name}" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor"))}
_is_open = False  # whether answers may be assumed; the code that is captured reads it, so the compiler checks it at every call


class WrongAnswerError(BaseException):
    """A graph was called for which an answer is wrong. Nothing of it has run. Code that it passes does not catch it."""


@contextmanager
def assuming(is_open: bool) -> Iterator[None]:
    """Answer questions inside, until a graph has run, or do not."""
    global _is_open
    was_open, _is_open = _is_open, is_open
    try:
        with _stand_in():
            yield
    finally:
        _is_open = was_open


@contextmanager
def _stand_in() -> Iterator[None]:
    """Have the library call what answers its questions; other threads may be inside, too."""
    global _num_inside
    own = vars(sys.modules[_MODULE]) if _MODULE in sys.modules else {}
    with _lock:
        if own and not _replaced:
            stand_ins = _list_stand_ins()
            _replaced.update((name, own[name]) for name in stand_ins)
            own.update(stand_ins)
        _num_inside += 1
    try:
        yield
    finally:
        with _lock:
            _num_inside -= 1
            if not _num_inside and _replaced:
                vars(sys.modules[_MODULE]).update(_replaced)
                _replaced.clear()


def take_out(graph: GraphModule) -> GraphModule | None:
    """Take what was assumed out of a graph. Return the graph that computes it from the same inputs; None if nothing was.

    Where that cannot be computed apart, because something is changed in place before it, or draws random numbers, it is wrong.
    """
    noted = [node for node in graph.graph.nodes if node.target is _note]
    if not noted:
        return None
    needed, copies, conditions = set(noted), dict[Node, Node](), Graph()
    nodes = list(graph.graph.nodes)
    for node in reversed(nodes):
        if node in needed:
            needed.update(node.all_input_nodes)
    is_pure = all(node.op == "placeholder" or _name(node) in _KNOWN for node in needed)
    is_pure = is_pure and not any(map(_writes, nodes[: nodes.index(noted[-1])]))
    for node in nodes:
        if node.op == "placeholder" or (is_pure and node in needed):
            copies[node] = conditions.node_copy(node, copies.__getitem__)
    conditions.output(tuple(copies[node] for node in noted) if is_pure else (False,))
    taken = GraphModule(graph, conditions)
    for node in reversed(nodes):
        if node in needed and node.op != "placeholder" and not node.users:
            graph.graph.erase_node(node)
    graph.recompile()
    return taken


def run_if(conditions: GraphModule | None, run: Callable[..., Any], *inputs: Any) -> Any:
    """Run a graph if what was assumed is so. Nothing is assumed after it: the call could not begin again.

    Raises:
        WrongAnswerError: it is not so.
    """
    global _is_open
    if conditions is not None:
        placeholders = conditions.graph.find_nodes(op="placeholder")
        values = [find_values(given) if node.users else None for node, given in zip(placeholders, inputs, strict=True)]
        if not all(has_value(each) for each in values if isinstance(each, Tensor)):
            raise WrongAnswerError
        with _disable_current_modes():
            if not all(map(bool, conditions(*values))):
                raise WrongAnswerError
    _is_open = False
    return run(*inputs)


def _name(node: Node) -> str:
    return str(getattr(node.target, "__name__", node.target))


def _writes(node: Node) -> bool:
    name = _name(node)
    is_in_place = name in _WRITING or (name.endswith("_") and not name.endswith("__")) or "out" in node.kwargs
    return node.op.startswith("call_") and is_in_place


@torch._dynamo.allow_in_graph
def _note(condition: Tensor) -> Tensor:
    return condition


def _assume(condition: Tensor) -> bool:
    if _is_open:
        _note(condition)
    return _is_open


@cache
def _list_stand_ins() -> dict[str, Callable[..., Any]]:
    own = vars(sys.modules[_MODULE])
    answers = dict.fromkeys(_MASK_QUESTIONS, _ask_without_padding) | {_PACKING_QUESTION: _find_packed}
    stand_ins: dict[str, Callable[..., Any]] = {
        **{name: partial(answer, own[name]) for name, answer in answers.items() if name in own},
        "is_tracing": _is_traced,
        "is_torchdynamo_exporting": lambda: False,  # of all that is compiled, PyTorch before 2.14 says that it is
    }
    return {name: function for name, function in stand_ins.items() if name in own}


def _ask_without_padding(ask: Callable[..., bool], padding: Tensor | None, *args: Any, **kwargs: Any) -> bool:
    """Ask whether attention needs no mask; a mask of padding that is all ones is none."""
    if padding is not None and _is_traced(padding) and ask(None, *args, **kwargs) and _assume(padding.all()):
        padding = None
    return ask(padding, *args, **kwargs)


def _find_packed(find: Callable[[Tensor], Tensor | None], positions: Tensor) -> Tensor | None:
    found = find(positions)
    return None if found is not None and _is_traced(found) and _assume((found[:, -1] == 0).all()) else found


def _is_traced(tensor: Tensor | None = None) -> bool:
    """Return whether a tensor has no values now. None has none to ask for."""
    return tensor is not None and (torch.compiler.is_compiling() or isinstance(tensor, FakeTensor) or tensor.is_meta)
