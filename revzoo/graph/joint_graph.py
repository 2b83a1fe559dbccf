"""The joint graph of a compiled step, taken apart.

The compiler traces forward and backward of what it compiles into one graph of operations without side effects. An operation of
forward is an atom. An operation of backward belongs to the atom whose gradient it computes: both have the number that autograd
gave the call.

A backend that writes kernels of its own runs several operations in one. What is read in the kernel that makes it takes no
memory, and costs nothing to make again.
"""

import operator
from collections.abc import Callable, Collection, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import SymInt, Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from revzoo.analysis.flops import count_operation_flops
from revzoo.graph.atoms import Atom
from revzoo.runtime.nested import map_tensors, tensors_in
from revzoo.runtime.operations import describe_operation

COPIES = "revzoo_copies"  # by identity of what forward made: of what was made again in its place, for this node
_FEW = 16  # a result and statistics of it are no more than the result, up to such a part
_KNOWN = ("aten", "prims", "_operator")  # operations of which it is known what they do
_MOVING = ("cudnn_batch_norm", "miopen_batch_norm", "native_batch_norm")  # running statistics, without saying so


@dataclass(frozen=True)
class JointGraph:
    """A joint graph, taken apart.

    Args:
        graph: as AOTAutograd has traced it.
        inputs: of forward: parameters, buffers and batch.
        tangents: the gradients that backward starts from.
        atoms: of forward: its operations, each with the parts of its result.
        backward: the operations of backward, each of those that need no tangent right before its first use.
        numbers: which calls these belong to, as autograd counts them.
        returned: what forward returns.
        gradients: what backward returns, by input.
        fusible: operations that the backend may run in one kernel with those before and after them.
        fused: of these, those whose results are never written to memory.
    """

    graph: Graph
    inputs: Sequence[Node]
    tangents: Sequence[Node]
    atoms: Sequence[Atom]
    backward: Sequence[Node]
    numbers: Sequence[int | None]
    returned: Sequence[Node]
    gradients: Sequence[Node]
    fusible: Set[Node]
    fused: Set[Node]

    @classmethod
    def read(
        cls, graph: Graph, num_inputs: int, changed: Collection[int] = (), is_fusible: Callable[[Node], bool] = lambda _: False
    ) -> "JointGraph":
        """Return the parts of a graph.

        Args:
            graph: as AOTAutograd has traced it.
            num_inputs: of its forward.
            changed: numbers of the inputs that are others after forward. What reads them cannot run again.
            is_fusible: whether the backend may run an operation together with those that read its result.
        """
        given = graph.find_nodes(op="placeholder")
        (output,) = graph.find_nodes(op="output")
        results = output.args[0]
        following = set(given[num_inputs:])  # what depends on the tangents
        forward: dict[Node, list[Node]] = {}
        backward: dict[Node, int | None] = {}  # with the number of the call whose gradient it computes
        loose = set[Node]()  # what backward makes from nothing, or from results of forward, and is not placed yet
        ahead = set[Node]()  # all of it
        for node in graph.nodes:
            if node.op == "call_function":
                if not following.isdisjoint(node.all_input_nodes):
                    following.add(node)
                    number = node.meta.get("seq_nr")
                    for each in _list_loose(node, loose):
                        backward[each] = number
                elif (tag := node.meta.get("partitioner_tag")) in ("is_backward", "must_be_in_backward") or (
                    tag is None and not ahead.isdisjoint(node.all_input_nodes)  # of the backend's own
                ):
                    loose.add(node)
                    ahead.add(node)
                else:
                    forward.setdefault(find_operation(node), []).append(node)
        keys = {key for number in changed for key, _ in find_storages(given[number])}
        return cls(
            graph=graph,
            inputs=given[:num_inputs],
            tangents=given[num_inputs:],
            atoms=[_make_atom(nodes, keys) for nodes in forward.values()],
            backward=list(backward),
            numbers=list(backward.values()),
            returned=[node for node in results[:-num_inputs] if isinstance(node, Node)],
            gradients=[node for node in results[-num_inputs:] if isinstance(node, Node)],
            fusible=(fusible := {node for node in graph.nodes if node.op == "call_function" and is_fusible(node)}),
            fused=_find_fused(graph, fusible),
        )

    def list_ends(self, operations: Sequence[Node]) -> list[int]:
        """Return for each operation the last that may run in one kernel with it: what they read is not freed before."""
        ends = list(range(len(operations)))
        for i in reversed(range(len(operations) - 1)):
            if operations[i] in self.fusible and operations[i + 1] in self.fusible:
                ends[i] = ends[i + 1]
        return ends

    def list_owners(self) -> list[int]:
        """Return for each operation of backward the atom whose gradient it computes."""
        place = {node: i for i, atom in enumerate(self.atoms) for node in atom.nodes}
        first = {node.meta.get("seq_nr"): i for node, i in reversed(place.items())}
        owner, owners = len(self.atoms) - 1, []
        for node, number in zip(self.backward, self.numbers, strict=True):
            owner = first.get(number, owner)
            # One call may be several atoms. What makes no gradient has the number of the call before it.
            own = [place[each] for each in node.all_input_nodes if each in place and each.meta.get("seq_nr") == number]
            owners.append(max([owner, *own]))
        return owners


def find_storages(node: Node) -> list[tuple[int, int]]:
    """Return identity and size of the memory of what a node returns. Where sizes may change, they are those of this batch."""
    storages = (t.untyped_storage() for t in tensors_in(node.meta.get("val")) if t.layout is torch.strided)
    copies = node.meta.get(COPIES, {})
    return [(copies.get(storage._cdata, storage._cdata), _read_size(storage.nbytes())) for storage in storages]


def count_flops(node: Node) -> int:
    """Return the floating-point operations of a node."""

    def find(each: Node) -> Any:
        value = each.meta.get("val")
        return _read_size(value) if isinstance(value, SymInt) else map_tensors(_fix_shape, value)

    args, kwargs = map_arg((node.args, node.kwargs), find)
    return count_operation_flops(node.target, args, kwargs, find(node))


def _fix_shape(t: Tensor) -> Tensor:
    if all(isinstance(size, int) for size in (*t.shape, *t.stride())):
        return t
    sizes, strides = map(_read_size, t.shape), map(_read_size, t.stride())
    return torch.empty_strided([*sizes], [*strides], dtype=t.dtype, device="meta")


def _read_size(size: int | SymInt) -> int:
    return size if isinstance(size, int) else int(size.node.hint or 0)


def _list_loose(node: Node, loose: set[Node]) -> list[Node]:
    """Return what a node of backward waits for, and the node; what it waits for is taken out of `loose`."""
    waits = [each for each in node.all_input_nodes if each in loose]
    loose.difference_update(waits)
    return [*(each for wait in waits for each in _list_loose(wait, loose)), node]


def _find_fused(graph: Graph, fusible: set[Node]) -> set[Node]:
    """Return the results that are read in the kernel that makes them.

    These are what is inside of one call, such as a norm, and what may be made again from no more than it is itself: a sum is
    written to memory, but not what an activation makes of it.
    """
    fused, roots = set[Node](), dict[Node, dict[int, int]]()
    for node in graph.nodes:
        roots[node] = dict(find_storages(node)) if node.op == "call_function" else {}  # what is given is there anyway
        if node in fusible and fusible.issuperset(readers := [*_list_readers(node)]):
            given = {key: size for each in node.all_input_nodes for key, size in roots[each].items()}
            own = sum(size for _, size in find_storages(node))
            is_inside = all(each.meta.get("seq_nr") == node.meta.get("seq_nr") for each in readers)
            if is_inside or sum(given.values()) <= own + own // _FEW or not roots[node].keys() - given.keys():
                fused.add(node)
                roots[node] = given
    return fused


def _list_readers(node: Node) -> Iterator[Node]:
    """Yield what reads the memory of a result, as a view of it or not."""
    storages = {key for key, _ in find_storages(node)}
    for user in node.users:
        if user.op == "call_function" and not storages.isdisjoint(key for key, _ in find_storages(user)):
            yield from _list_readers(user)
        else:
            yield user


def find_operation(node: Node) -> Node:
    """Return the operation that a node takes a part of."""
    while node.target is operator.getitem and isinstance(node.args[0], Node) and node.args[0].op == "call_function":
        node = node.args[0]
    return node


def _make_atom(nodes: Sequence[Node], changed: Set[int]) -> Atom:
    target, args = cast(Any, nodes[0].target), nodes[0].args
    draws = describe_operation(target).draws(args, nodes[0].kwargs)
    space, mutates, name = getattr(target, "__module__", ""), False, ""
    if isinstance(target, torch._ops.OpOverload):
        space, mutates, name = target.namespace, target._schema.is_mutable, target._overloadpacket.__name__
    read = [*nodes[0].all_input_nodes]
    if name == "_native_batch_norm_legit_functional" and args[5]:  # its result does not depend on the running statistics
        read = [each for each in read if each not in args[3:5]]
    is_stale = any(key in changed for each in read for key, _ in find_storages(each))
    draws_seeds = draws and space == "prims"
    is_repeatable = space in _KNOWN and name not in _MOVING and not (mutates or is_stale or draws_seeds)
    return Atom.of(nodes, changes=[], draws=draws, is_repeatable=is_repeatable)
