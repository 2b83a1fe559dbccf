"""Atoms: the smallest pieces of a captured graph that can run again by themselves.

A graph is what `torch.compile` hands to its backend: calls of torch functions in the order in which the module made them, with
parameters, buffers and the batch as inputs. Most atoms are one call. A call that changes a tensor in place (`relu_`, `+=`)
belongs to the same atom as the one that made the tensor, and with all calls in between, so that no atom changes what another
has returned.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.utils._python_dispatch import TorchDispatchMode

from revzoo.runtime.nested import tensors_in
from revzoo.runtime.operations import describe

_STATISTICS = (F.batch_norm, torch.batch_norm, F.instance_norm, torch.instance_norm)  # they take running statistics
_INPUTS = ("placeholder", "get_attr")


@dataclass(frozen=True)
class Atom:
    """Consecutive calls of a graph that run together.

    Args:
        nodes: the calls.
        makes: those of them whose results are used by others.
        reads: the nodes outside whose results it uses, inputs of the graph among them.
        draws: whether it may draw random numbers.
        is_repeatable: whether it may run again: it changes no tensor that it has not made, and no setting.
    """

    nodes: tuple[Node, ...]
    makes: tuple[Node, ...]
    reads: tuple[Node, ...]
    draws: bool
    is_repeatable: bool

    @classmethod
    def of(cls, nodes: Sequence[Node], *, draws: bool, is_repeatable: bool) -> "Atom":
        """Return the atom of these calls, in order."""
        inside = set(nodes)
        makes = tuple(node for node in nodes if any(user not in inside for user in node.users))
        reads = tuple(dict.fromkeys(each for node in nodes for each in node.all_input_nodes if each not in inside))
        return cls(tuple(nodes), makes, reads, draws, is_repeatable)

    @property
    def name(self) -> str:
        """The name of its last call."""
        return self.nodes[-1].name


def list_inputs(graph: GraphModule) -> list[Node]:
    """Return the nodes that stand for inputs and constants of the graph."""
    return [node for node in graph.graph.nodes if node.op in _INPUTS]


def call_node(graph: GraphModule, node: Node, env: dict[Node, Any]) -> Any:
    """Run one call of a graph, with the results of others at hand."""
    args, kwargs = map_arg((node.args, node.kwargs), env.__getitem__)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    if node.op == "call_module":
        return graph.get_submodule(str(node.target))(*args, **kwargs)
    assert callable(node.target)
    return node.target(*args, **kwargs)


def split_into_atoms(graph: GraphModule, inputs: Sequence[Any]) -> list[Atom]:
    """Return the atoms of a graph, in an order in which they can run.

    Args:
        graph: as captured.
        inputs: what it is called with, FakeTensors in place of tensors. They are changed as the graph changes them.
    """
    follower = _Follower(graph, inputs)
    calls = [follower.run(node) for node in graph.graph.nodes if node.op not in (*_INPUTS, "output")]
    place = {call.node: i for i, call in enumerate(calls)}
    group = list(range(len(calls)))  # by call: the number of the last call of its atom
    for i, call in enumerate(calls):
        if call.changes:
            _join(calls, group, min(place[node] for node in call.changes), i)
    members: dict[int, list[_Call]] = {}
    for i, last in enumerate(group):
        members.setdefault(last, []).append(calls[i])
    return [_make_atom(members[last]) for last in sorted(members)]


def _join(calls: Sequence["_Call"], group: list[int], first: int, last: int) -> None:
    """Make one atom of two calls and of those in between that depend on it; the others are moved in front of it."""
    joined = {group[first]}
    while True:
        inside = [j for j in range(len(calls)) if group[j] in joined and j <= last]
        nodes = {calls[j].node for j in inside} | {calls[last].node}
        shared = {each for j in (*inside, last) for each in calls[j].changes_inputs}
        draws = any(calls[j].draws for j in (*inside, last))
        more = {
            group[j]
            for j in range(min(inside), last)
            if group[j] not in joined
            and (
                not nodes.isdisjoint(calls[j].node.all_input_nodes)
                or not shared.isdisjoint(calls[j].node.all_input_nodes)
                or not calls[j].changes_inputs.isdisjoint(each for node in nodes for each in node.all_input_nodes)
                or (draws and calls[j].draws)
                or calls[j].changes_setting
            )
        }
        if not more:
            break
        joined |= more
    for j in range(last + 1):
        if group[j] in joined:
            group[j] = last


def _make_atom(calls: Sequence["_Call"]) -> Atom:
    changes_others = any(call.changes_setting or call.changes_inputs - call.statistics for call in calls)
    return Atom.of([call.node for call in calls], draws=any(call.draws for call in calls), is_repeatable=not changes_others)


@dataclass(frozen=True)
class _Call:
    """What one call of a graph does besides returning a result.

    Args:
        node: the call.
        changes: calls whose results it changes in place.
        changes_inputs: inputs of the graph that it changes.
        statistics: those of them that its result does not depend on.
        changes_setting: whether it changes a setting, such as autocast, and returns nothing.
        draws: whether it draws random numbers.
    """

    node: Node
    changes: frozenset[Node]
    changes_inputs: frozenset[Node]
    statistics: frozenset[Node]
    changes_setting: bool
    draws: bool


class _Follower:
    """Runs a graph call by call and sees which tensors each of them changes."""

    def __init__(self, graph: GraphModule, inputs: Sequence[Any]):
        self._graph = graph
        self._env: dict[Node, Any] = dict(bind_inputs(graph, inputs))
        self._makers: dict[int, Node] = {}  # by storage: the input or call that has made it
        for node, value in self._env.items():
            self._makers |= {_key(t): node for t in tensors_in(value)}

    def run(self, node: Node) -> _Call:
        """Run a call and return what it does."""
        given = [t for each in node.all_input_nodes for t in tensors_in(self._env[each])]
        before = [t._version for t in given]
        grad_mode = torch.is_grad_enabled()
        with _Drawing() as drawing:
            out = self._env[node] = call_node(self._graph, node, self._env)
        torch.set_grad_enabled(grad_mode)
        changed = {self._makers[_key(t)] for t, version in zip(given, before, strict=True) if t._version != version}
        for t in tensors_in(out):
            self._makers.setdefault(_key(t), node)
        statistics = frozenset(list_statistics(node))
        inputs = frozenset(each for each in changed if each.op in _INPUTS) | statistics
        computes = bool(changed) or isinstance(out, Tensor | tuple | list | int | float | bool)
        return _Call(node, frozenset(changed) - inputs, inputs, statistics, not computes, drawing.has_drawn)


def find_last_uses(graph: GraphModule) -> dict[Node, Node]:
    """Return for every node the last one that uses its result."""
    last: dict[Node, Node] = {}
    for node in graph.graph.nodes:
        for each in node.all_input_nodes:
            last[each] = node
    return last


def bind_inputs(graph: GraphModule, inputs: Sequence[Any]) -> Iterator[tuple[Node, Any]]:
    """Yield the inputs and constants of a graph with their values."""
    given = iter(inputs)
    for node in list_inputs(graph):
        yield node, next(given) if node.op == "placeholder" else _get_attribute(graph, str(node.target))


def list_statistics(node: Node) -> list[Node]:
    """Return the running statistics that a call may change without showing it. Its result does not depend on them then."""
    if node.target not in _STATISTICS:
        return []
    given = [*node.args[1:3], node.kwargs.get("running_mean"), node.kwargs.get("running_var")]
    return [each for each in given if isinstance(each, Node)]


def _get_attribute(graph: GraphModule, path: str) -> Any:
    value: Any = graph
    for name in path.split("."):
        value = getattr(value, name)
    return value


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


class _Drawing(TorchDispatchMode):
    """Notices operations that draw random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.has_drawn = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.has_drawn |= describe(func).draws(args, kwargs or {})
        return func(*args, **(kwargs or {}))
