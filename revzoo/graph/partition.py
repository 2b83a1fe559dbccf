"""A joint graph cut by a plan: backward reads what is kept, and copies of the operations that make the rest again.

Every span has copies of its own, and every nest of what it hands to its spans. One copy for all would live from the first span
that reads it to the last. What is cut is still one joint graph, so that each backend of the compiler goes on with it: for its
partitioner what is kept is marked as what must be saved, and copies as a part of backward.

An operation that draws random numbers draws them again from the state that the generator had in forward.
"""

import operator
from bisect import bisect_right
from collections.abc import Hashable
from itertools import count, pairwise
from typing import Any, cast

import torch
from torch import Tensor
from torch._prims.rng_prims import run_and_save_rng_state, run_with_rng_state
from torch.fx import Graph, Node
from torch.fx.node import Target, map_arg
from torch.utils.checkpoint import CheckpointPolicy

from revzoo.graph.joint_graph import COPIES, JointGraph, find_storages
from revzoo.graph.spans import Nest, Spans
from revzoo.runtime.nested import tensors_in


def cut(joint: JointGraph, spans: Spans) -> None:
    """Rewrite a joint graph so that its backward makes again what the spans drop."""
    for node in joint.graph.nodes:  # of checkpoints in the module, in whose place the plan is
        node.meta.pop("recompute", None)
    _Cut(joint, spans).run()


def is_cut(graph: Graph) -> bool:
    """Return whether a graph was cut, and makes something again."""
    return any(COPIES in node.meta for node in graph.nodes)


class Remaker:
    """Has backward read copies of operations of forward in place of what it is not to keep.

    Args:
        joint: the graph.
    """

    def __init__(self, joint: JointGraph):
        self.joint = joint
        self.atoms = {node: atom for atom in joint.atoms for node in atom.nodes}
        self._copies: dict[tuple[Hashable, Node], Node] = {}  # by where it is made again, and what is copied
        self._numbers = count(-1, -1)  # of what is made again: identities are above
        self.results: dict[Node, Node] = {}  # of what draws, by the node that stood for it before
        self._drawn: dict[Node, tuple[Any, Any]] = {}  # by result of what draws: state of the generator, and operation

    def run(self) -> None:
        """Rewrite the graph."""
        for node, following in reversed([*pairwise(self.joint.backward)]):
            following.prepend(node)
        for node, owner in zip(self.joint.backward, self.joint.list_owners(), strict=True):
            node.meta["partitioner_tag"] = "must_be_in_backward"  # also what needs no gradient, and might be made in forward
            place = self.enter(owner, node)
            for each in node.all_input_nodes:
                found = self.find(place, each, node)
                given = self.results.get(each, each)
                if found is not given:
                    node.replace_input_with(given, found)
            if copies := _list_copies(node):
                node.meta[COPIES] = copies

    def enter(self, owner: int, node: Node) -> Hashable:
        """Return where an operation of backward reads, which computes the gradient of this atom."""
        raise NotImplementedError

    def choose(self, place: Any, node: Node) -> Hashable:
        """Return where a result is made again for whoever reads it at a place; None if it is kept."""
        raise NotImplementedError

    def find(self, place: Any, node: Node, before: Node) -> Node:
        """Return what stands for a result where it is read, and have it made before an operation."""
        node = self.results.get(node, node)
        if node not in self.atoms:
            return node
        is_number = not isinstance(node.meta.get("val"), Tensor | tuple | list)
        if is_number or not self.atoms[node].is_repeatable or (place := self.choose(place, node)) is None:
            if isinstance(node.meta.get("val"), Tensor):
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
            return node
        if self.atoms[node].draws and node.target is not operator.getitem and node not in self._drawn:
            node = self.save_state(node)
        if (place, node) not in self._copies:
            self._copies[place, node] = self._copy(place, node, before)
        return self._copies[place, node]

    def _copy(self, place: Any, node: Node, before: Node) -> Node:
        def find(each: Node) -> Node:
            return self.find(place, each, before)

        source = cast(Node, node.args[0]) if node in self._drawn else node
        for each in source.all_input_nodes:
            find(each)  # so that what draws is replaced in the arguments before they are read
        args, kwargs = map_arg((source.args, source.kwargs), find)
        target: Target = source.target
        if node in self._drawn:
            target, args = run_with_rng_state, (*self._drawn[node], *args[1:])
        with self.joint.graph.inserting_before(before):
            copied = self.joint.graph.create_node("call_function", target, args, kwargs)
        given = {key for each in source.all_input_nodes for key, _ in find_storages(each)}
        made = {key: next(self._numbers) for key, _ in find_storages(node) if key not in given}
        copied.meta = node.meta | {"partitioner_tag": "must_be_in_backward", COPIES: _list_copies(copied) | made}
        copied.meta.pop("recompute", None)
        return copied

    def save_state(self, node: Node) -> Node:
        """Have an operation also return the state of the generator before it. Return what stands for its result."""
        graph = self.joint.graph
        with graph.inserting_before(node):
            both = graph.call_function(run_and_save_rng_state, (cast(Any, node.target), *node.args), node.kwargs)
            state, result = (graph.call_function(operator.getitem, (both, i)) for i in range(2))
        fake = cast(Any, next(tensors_in(node.meta["val"])))
        module = torch.random if fake.device.type == "cpu" else torch.get_device_module(fake.device)
        result.meta = node.meta
        tag = {"partitioner_tag": "is_forward"}
        state.meta = {"val": fake.fake_mode.from_tensor(module.get_rng_state()), "recompute": CheckpointPolicy.MUST_SAVE} | tag
        both.meta = {"val": (state.meta["val"], node.meta["val"])} | tag
        node.replace_all_uses_with(result)
        graph.erase_node(node)
        self.atoms[result] = self.atoms[node]
        self.results[node], self._drawn[result] = result, (state, node.target)
        return result


class _Cut(Remaker):
    def __init__(self, joint: JointGraph, spans: Spans):
        super().__init__(joint)
        self._spans = spans
        self._nests = {span: nest for nest in spans.nests for span in range(nest.first, nest.end)}

    def enter(self, owner: int, node: Node) -> int:
        return bisect_right(self._spans.ends, owner)

    def choose(self, place: int | Nest, node: Node) -> int | Nest | None:
        if node in self._spans.kept:
            return None
        if isinstance(place, int) and place in self._nests and node in self._nests[place].handed:
            return self._nests[place]
        return place


def _list_copies(node: Node) -> dict[int, int]:
    """Return what stands for the results of forward in what a node reads."""
    return {key: number for each in node.all_input_nodes for key, number in each.meta.get(COPIES, {}).items()}
