"""Operations that forward and backward have in common, as one subroutine that both call.

A backend that fuses operations may round a second run otherwise than the first, since it has other neighbours. Of a subroutine
it writes the same code for both.
"""

import operator
from collections.abc import Collection, Hashable, Mapping
from typing import cast

import torch
from torch import SymInt, Tensor
from torch._inductor.pattern_matcher import stable_topological_sort
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from revzoo.graph.joint_graph import find_storages

Twins = dict[Node, Node]  # by operations of forward: the same ones in backward


def share_code(module: GraphModule, groups: Collection[Mapping[Node, Node]]) -> None:
    """Replace operations by calls of subroutines.

    Args:
        module: of a joint graph.
        groups: operations of forward, each with its copy in backward.
    """
    order = {node: i for i, node in enumerate(module.graph.nodes)}
    names: dict[Hashable, str] = {}
    for group in groups:
        for twins in _divide(module.graph, _select(module.graph, group, order)):
            _share(module, twins, names)
    stable_topological_sort(module.graph)
    module.graph.eliminate_dead_code()


def _select(graph: Graph, group: Mapping[Node, Node], order: Mapping[Node, int]) -> Twins:
    """Return what a subroutine may have, with all parts of its results."""
    twins: Twins = {}
    for node in sorted(group.keys() & order.keys(), key=order.__getitem__):
        copied = group[node]
        if copied not in order or (node.target is operator.getitem and node.args[0] not in twins):
            continue
        if node.target is torch.ops.prims.inductor_lookup_seed.default:
            continue  # by its number, which is another one in each step
        if _is_view(node) and not any(each in twins for each in node.all_input_nodes):
            continue  # of what it is given: no result of a subroutine may share memory with what it is given
        twins[node] = copied
        if node.target is not operator.getitem and isinstance(node.meta["val"], tuple | list):
            _pair_parts(graph, node, copied, twins)
    return twins


def _pair_parts(graph: Graph, node: Node, copied: Node, twins: Twins) -> None:
    parts = [{cast(int, user.args[1]): user for user in each.users} for each in (node, copied)]
    for index, value in enumerate(node.meta["val"]):
        if not isinstance(value, Tensor) or not any(index in each for each in parts):
            continue
        for each, known in zip((node, copied), parts, strict=True):
            if index not in known:
                with graph.inserting_after(each):
                    known[index] = graph.call_function(operator.getitem, (each, index))
                known[index].meta = {k: v for k, v in each.meta.items() if k != "recompute"} | {"val": each.meta["val"][index]}
        twins[parts[0][index]] = parts[1][index]


def _divide(graph: Graph, twins: Twins) -> list[Twins]:
    """Return the parts of what is to be shared, between which nothing else has to run."""
    levels: dict[Node, int] = {}
    for node in graph.nodes:
        before = [levels[each] + (node in twins and each not in twins) for each in node.all_input_nodes if each in levels]
        if before or node in twins:
            levels[node] = max(before, default=0)
    parts: dict[int, Twins] = {}
    for node, copied in twins.items():
        parts.setdefault(levels[node], {})[node] = copied
    return list(parts.values())


def _share(module: GraphModule, twins: Twins, names: dict[Hashable, str]) -> None:
    """Replace operations and their copies by calls of a subroutine, which steps of the same code have in common."""
    given = {
        each: other
        for node, copied in twins.items()
        for each, other in zip(_list_inputs(node), _list_inputs(copied), strict=True)
        if each not in twins
    }
    inside, new = Graph(), dict[Node, Node]()
    for each in given:
        new[each] = inside.placeholder(f"given_{len(new)}")
        new[each].meta = {"val": each.meta["val"]}
    for node in twins:
        new[node] = inside.create_node(node.op, node.target, *map_arg((node.args, node.kwargs), new.__getitem__))
        new[node].meta = {"val": node.meta["val"]}
    returned = _list_returned(twins)
    inside.output(tuple([new[node] for node in returned]))
    code = GraphModule(module, inside)
    layouts = [_describe(each.meta["val"]) for pair in given.items() for each in pair]
    name = names.setdefault((code.code, *layouts), f"revzoo_step_{len(names)}")
    if not hasattr(module, name):
        module.add_submodule(name, code)
    _call(module.graph, name, list(twins)[-1], "is_forward", list(given), returned)
    _call(
        module.graph,
        name,
        next(iter(twins.values())),
        "must_be_in_backward",
        list(given.values()),
        [twins[node] for node in returned],
    )


def _call(graph: Graph, name: str, place: Node, tag: str, operands: list[Node], results: list[Node]) -> None:
    with graph.inserting_before(place):
        subroutine = graph.get_attr(name)
        call = graph.call_function(torch.ops.higher_order.invoke_subgraph, (subroutine, name, *operands))
        call.meta = {"val": tuple(each.meta["val"] for each in results), "partitioner_tag": tag}
        for i, each in enumerate(results):
            part = graph.call_function(operator.getitem, (call, i))
            part.meta = each.meta
            each.replace_all_uses_with(part)


def _list_returned(twins: Twins) -> list[Node]:
    """Return what others read: a view is left outside, too, so that no two results share memory."""
    read = set[Node]()
    for pair in reversed(twins.items()):
        for each, members in zip(pair, (twins.keys(), set(twins.values())), strict=True):
            if any(user not in members or (user in read and _is_view(user)) for user in each.users):
                read.add(each)
    return [node for node, copied in twins.items()
            if (node in read or copied in read) and isinstance(node.meta["val"], Tensor) and not _is_view(node)]  # fmt: skip


def _describe(value: Tensor | SymInt) -> Hashable:
    """Return what code depends on of a value."""
    return (str(value.shape), str(value.stride()), value.dtype, value.device) if isinstance(value, Tensor) else str(value)


def _list_inputs(node: Node) -> list[Node]:
    """Return what an operation reads, as often as it does."""
    inputs: list[Node] = []
    map_arg((node.args, node.kwargs), inputs.append)
    return inputs


def _is_view(node: Node) -> bool:
    if node.target is operator.getitem:
        return _is_view(cast(Node, node.args[0]))
    read = {key for each in node.all_input_nodes for key, _ in find_storages(each)}
    return any(key in read for key, _ in find_storages(node))
