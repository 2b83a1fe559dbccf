"""What tells captured graphs apart: names of their calls, a hash, and which inputs share memory.

Numbers do not count where they change values alone. So a graph in which an annealed temperature is a constant is the same as
one with another temperature, and as one that gets it as an input.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate

from revzoo.graph.atoms import Atom, find_numbers, list_written, prepare_inputs, read_key
from revzoo.runtime.nested import tensors_in

SharedInputs = tuple[tuple[str, ...], ...]


def name_nodes(graph: Graph) -> dict[Node, str]:
    """Return the names of inputs and calls of a graph, but for numbers."""
    names, counts, numbers = dict[Node, str](), Counter[str](), find_numbers(graph)
    for node in graph.nodes:
        if node in numbers:
            continue
        if node.op == "placeholder":
            names[node] = node.name
        else:
            name = re.sub(r"(_\d+)+$", "", node.name)
            names[node] = f"{name}_{counts[name]}" if counts[name] else name
            counts[name] += 1
    return names


def compute_digest(graph: GraphModule, inputs: Sequence[Any]) -> str:
    """Return a hash of a graph's calls with arguments and shapes, and of its inputs' shapes, dtypes and need of gradients."""
    values, names = prepare_inputs(graph)(inputs), name_nodes(graph.graph)
    calls = []
    for node, name in names.items():
        if node.op == "placeholder":  # in any order
            continue
        function = node.target
        target = function if isinstance(function, str) else getattr(function, "__name__", type(function).__name__)
        scales = getattr(function, "__module__", None) == "_operator" and not target.endswith("item")
        args = map_aggregate((node.args, node.kwargs), partial(_describe, values=values, names=names, scales=scales))
        shapes = [tuple(t.shape) for t in tensors_in(node.meta.get("example_value"))]
        calls.append((node.op, name, target, repr(args), repr(shapes)))
    given = {names[node]: x for node, x in values.items() if node in names}
    tensors = {k: (tuple(x.shape), x.dtype, x.requires_grad) for k, x in given.items() if isinstance(x, Tensor)}
    return hashlib.sha256(repr((calls, sorted((given | tensors).items(), key=str))).encode()).hexdigest()


def find_shared(placeholders: Sequence[Node], inputs: Sequence[Any], atoms: Sequence[Atom]) -> SharedInputs:
    """Return the names of inputs that lie in one memory, by memory, if an atom writes to it."""
    if not (written := list_written(atoms)):
        return ()
    sharing: dict[int, list[Node]] = {}
    for node, value in zip(placeholders, inputs, strict=True):
        if isinstance(value, Tensor):
            sharing.setdefault(read_key(value), []).append(node)
    classes = (each for each in sharing.values() if len(each) > 1 and not written.isdisjoint(each))
    return tuple(tuple(node.name for node in each) for each in classes)


def _describe(argument: Any, values: Mapping[Node, Any], names: Mapping[Node, str], scales: bool) -> Any:
    """Return an argument as a part of a digest.

    Args:
        argument: of a call.
        values: of numbers.
        names: of other nodes.
        scales: whether the call is one of Python's operators: then a number decides on values alone. Elsewhere an integer may
            be a size or dimension, and functions with a rate of 0 or 1 may do other things.
    """
    if isinstance(argument, Node):
        if argument in names:
            return names[argument]
        argument = values[argument]
    if isinstance(argument, float) and (scales or argument not in (0.0, 1.0)):
        return float
    return int if scales and type(argument) is int else argument
