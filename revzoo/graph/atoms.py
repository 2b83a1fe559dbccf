"""Atoms: the smallest pieces of a captured graph that can run again by themselves.

A graph is what `torch.compile` hands to its backend: calls of torch functions in the order in which the module made them, with
parameters, buffers and the batch as inputs. Most atoms are one call. A call that changes a tensor in place (`relu_`, `+=`)
shares an atom with the call that made the tensor, and with all calls in between that depend on it. So no atom changes what
another has returned.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.utils._python_dispatch import TorchDispatchMode

from revzoo.analysis.dry_run import preserve_random_streams
from revzoo.analysis.fake_tensors import find_fake_mode
from revzoo.graph.expansion import expand_calls, get_attribute
from revzoo.runtime.compiling import leave_uncompiled
from revzoo.runtime.nested import map_tensors, tensors_in
from revzoo.runtime.operations import describe_operation

# What takes running statistics: their first position, and whether they move where the sixth argument does not say it.
_STATISTICS = {
    F.batch_norm: (1, False),
    torch.batch_norm: (3, False),
    F.instance_norm: (1, True),
    torch.instance_norm: (3, True),
}
_ROOT = re.compile(r"^\w\['\w+'\]\.?|\.?__dict__\['_modules'\]")  # how the compiler calls the captured module and its parts
_INDEX = re.compile(r"\[['\"]?(\w+)['\"]?\]")
_INPUTS = ("placeholder", "get_attr")
_NUMBERS = int, float, torch.SymInt, torch.SymFloat, torch.SymBool
Calls = Sequence[Sequence[tuple[Node, Callable[[Mapping[Node, Any]], Any]]]]  # by atom


@dataclass(frozen=True)
class Atom:
    """Consecutive calls of a graph that run together.

    Args:
        nodes: the calls.
        makes: those of them whose results are used by others.
        reads: the nodes outside whose results it uses, inputs of the graph among them, but for `statistics`.
        changes: inputs of the graph that it changes.
        statistics: those of them on which its results do not depend.
        draws: whether it may draw random numbers.
        is_repeatable: whether it may run again: it changes no tensor that it has not made, and no setting, and reads no input
            that the graph changes later.
    """

    nodes: tuple[Node, ...]
    makes: tuple[Node, ...]
    reads: tuple[Node, ...]
    changes: tuple[Node, ...]
    statistics: tuple[Node, ...]
    draws: bool
    is_repeatable: bool

    @classmethod
    def of(cls, nodes: Sequence[Node], *, changes: Sequence[Node], draws: bool, is_repeatable: bool) -> "Atom":
        """Return the atom of these calls, in order."""
        inside = set(nodes)
        makes = tuple(node for node in nodes if any(user not in inside for user in node.users))
        statistics, reads = dict[Node, None](), dict[Node, None]()
        for node in nodes:
            moved = dict.fromkeys(_list_moved_inputs(node))
            statistics |= moved
            reads |= dict.fromkeys(each for each in node.all_input_nodes if each not in moved and each not in inside)
        return cls(tuple(nodes), makes, tuple(reads), tuple(changes), tuple(statistics), draws, is_repeatable)

    @property
    def name(self) -> str:
        """Its last call in the user's words: the path of the submodule that makes it, and the function."""
        return name_call(self.nodes[-1]) if self.nodes else "what runs between captured graphs"


def name_call(node: Node) -> str:
    """Return the path of the submodule that makes a call, and the function: `blocks.3.mlp.fc1 (linear)`."""
    function = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    paths = [path for path, _ in node.meta.get("nn_module_stack", {}).values()]
    path = _INDEX.sub(r".\1", _ROOT.sub("", paths[-1])).lstrip(".") if paths else ""
    return f"{path} ({function})" if path else function


def find_numbers(graph: Graph) -> set[Node]:
    """Return the inputs that are numbers, which may be others in the next call, and what follows from them alone.

    The compiler passes a number as a tensor of one element, which stands for nothing else, and reads it in the graph.
    """
    numbers = set[Node]()
    for node in graph.nodes:
        given, is_number = {*node.all_input_nodes}, isinstance(node.meta.get("example_value"), _NUMBERS)
        if node.op == "placeholder":
            is_number |= [user.target for user in node.users] == ["item"]
        if is_number and given <= numbers and (given or node.op == "placeholder"):
            numbers.add(node)
    return numbers


def prepare_call(graph: GraphModule, node: Node) -> Callable[[Mapping[Node, Any]], Any]:
    """Return what runs one call of a graph, given the results of others."""
    function = _find_function(graph, node)
    constants = [a for a in (*node.args, *node.kwargs.values()) if not isinstance(a, Node)]
    inside: list[Node] = []
    map_arg(constants, inside.append)
    if inside:  # in a list or slice

        def call_nested(env: Mapping[Node, Any]) -> Any:
            args, kwargs = map_arg((node.args, node.kwargs), env.__getitem__)
            return function(*args, **kwargs)

        return call_nested
    args, kwargs = list(node.args), dict(node.kwargs)
    positions = [(i, a) for i, a in enumerate(args) if isinstance(a, Node)]
    names = [(name, a) for name, a in kwargs.items() if isinstance(a, Node)]

    def call(env: Mapping[Node, Any]) -> Any:
        given: list[Any] = args.copy()
        for i, each in positions:
            given[i] = env[each]
        if not names:
            return function(*given, **kwargs)
        return function(*given, **(kwargs | {name: env[each] for name, each in names}))

    return call


def prepare_calls(graph: GraphModule, atoms: Sequence[Atom]) -> Calls:
    """Return what runs the calls of every atom."""
    return [[(node, prepare_call(graph, node)) for node in atom.nodes] for atom in atoms]


def list_written(atoms: Sequence[Atom]) -> set[Node]:
    """Return the inputs of a graph that atoms change."""
    return {node for atom in atoms for node in atom.changes}


def list_dead(atoms: Sequence[Atom]) -> list[list[Node]]:
    """Return for each atom the results to free once it has run: no later atom and no output of the graph needs them."""
    number = {node: i for i, atom in enumerate(atoms) for node in atom.nodes}
    dead: list[list[Node]] = [[] for _ in atoms]
    for node, i in number.items():
        # Atoms may run in another order than calls stand in the graph.
        last = max((number.get(user, len(atoms)) for user in node.users), default=i)
        if last < len(atoms):
            dead[last].append(node)
    return dead


def _find_function(graph: GraphModule, node: Node) -> Callable[..., Any]:
    if node.op == "call_method":
        name = str(node.target)
        return lambda tensor, *args, **kwargs: getattr(tensor, name)(*args, **kwargs)
    if node.op == "call_module":
        return graph.get_submodule(str(node.target))
    assert callable(node.target)
    return node.target


def split_into_atoms(graph: GraphModule, inputs: Sequence[Any]) -> list[Atom]:
    """Return the atoms of a graph, in an order in which they can run.

    Args:
        graph: as captured. Its calls are expanded.
        inputs: what it is called with, FakeTensors or not. It runs with FakeTensors of its own, or with copies of the inputs
            where that needs values.
    """
    expand_calls(graph)
    try:
        calls = _follow_fake(graph, inputs)
    except Exception:  # many kinds are possible
        if any(isinstance(t, FakeTensor) for t in tensors_in(list(inputs))):
            raise
        calls = _follow_copies(graph, inputs)
    place = {call.node: i for i, call in enumerate(calls)}
    group = list(range(len(calls)))  # by call: the number of the last call of its atom
    for i, call in enumerate(calls):
        if call.changes:
            _join(calls, group, {place[node] for node in call.changes}, i)
    changed_later = set[Node]()
    stale = set[Node]()  # calls that would read something else the second time
    for call in reversed(calls):
        if not changed_later.isdisjoint(call.reads_inputs):
            stale.add(call.node)
        changed_later |= call.changes_inputs
    members: dict[int, list[_Call]] = {}
    for i, last in enumerate(group):
        members.setdefault(last, []).append(calls[i])
    return [_make_atom(members[last], stale) for last in sorted(members)]


def _follow_fake(graph: GraphModule, inputs: Sequence[Any]) -> list["_Call"]:
    mode = find_fake_mode(list(tensors_in(list(inputs))), always=True)
    assert mode is not None

    def make_fake(t: Tensor) -> Tensor:
        fake = t.detach() if isinstance(t, FakeTensor) else mode.from_tensor(t.detach())
        return _take_place_of(t, fake)

    fakes = [map_tensors(make_fake, each) for each in inputs]
    with mode:
        return _follow(graph, fakes)


def _follow_copies(graph: GraphModule, inputs: Sequence[Any]) -> list["_Call"]:
    copies = [map_tensors(lambda t: _take_place_of(t, t.detach().clone()), each) for each in inputs]
    with preserve_random_streams(tensors_in(list(inputs))):
        return _follow(graph, copies)


def _take_place_of(t: Tensor, copied: Tensor) -> Tensor:
    copied.requires_grad_(t.requires_grad)
    if t.is_leaf:
        return copied
    result = copied.clone()  # which the graph may change in place
    result.data = copied
    return result


def _follow(graph: GraphModule, inputs: Sequence[Any]) -> list["_Call"]:
    with torch.set_grad_enabled(torch.is_grad_enabled()):  # the graph may switch it
        follower = _Follower(graph, inputs)
        return [follower.run(node) for node in graph.graph.nodes if node not in follower.inputs and node.op != "output"]


def _join(calls: Sequence["_Call"], group: list[int], firsts: Collection[int], last: int) -> None:
    """Make one atom of calls, a last one, and those in between that depend on it; the others are moved before it."""
    joined = {group[first] for first in firsts}
    while True:
        inside = [j for j in range(len(calls)) if group[j] in joined and j <= last]
        nodes = {calls[j].node for j in inside} | {calls[last].node}
        shared = {each for j in (*inside, last) for each in calls[j].changes_inputs}
        read = {each for j in (*inside, last) for each in calls[j].reads_inputs}
        draws = any(calls[j].draws for j in (*inside, last))
        changes_setting = any(calls[j].changes_setting for j in range(min(inside), last))  # nothing may move across it
        more = {
            group[j]
            for j in range(min(inside), last)
            if group[j] not in joined
            and (
                changes_setting
                or not nodes.isdisjoint(calls[j].node.all_input_nodes)
                or not shared.isdisjoint(calls[j].reads_inputs | calls[j].changes_inputs)
                or not calls[j].changes_inputs.isdisjoint(read)
                or (draws and calls[j].draws)
            )
        }
        if not more:
            break
        joined |= more
    for j in range(last + 1):
        if group[j] in joined:
            group[j] = last


def _make_atom(calls: Sequence["_Call"], stale: set[Node]) -> Atom:
    nodes = [call.node for call in calls]
    changes_others = any(call.changes_setting or call.changes_inputs - call.statistics for call in calls)
    is_repeatable = not changes_others and stale.isdisjoint(nodes)
    changes = list(dict.fromkeys(node for call in calls for node in call.changes_inputs))
    return Atom.of(nodes, changes=changes, draws=any(call.draws for call in calls), is_repeatable=is_repeatable)


@dataclass(frozen=True)
class _Call:
    """What one call of a graph does besides returning a result.

    Args:
        node: the call.
        reads_inputs: inputs of the graph that share memory with its arguments, but for `statistics`.
        changes: calls whose results it changes in place.
        changes_inputs: inputs of the graph that it changes.
        statistics: those of them that its result does not depend on.
        changes_setting: whether it changes a setting, such as autocast, and returns nothing.
        draws: whether it draws random numbers.
    """

    node: Node
    reads_inputs: frozenset[Node]
    changes: frozenset[Node]
    changes_inputs: frozenset[Node]
    statistics: frozenset[Node]
    changes_setting: bool
    draws: bool


class _Follower:
    """Runs a graph call by call and sees which tensors each of them changes."""

    def __init__(self, graph: GraphModule, inputs: Sequence[Any]):
        self._graph = graph
        self._env: dict[Node, Any] = prepare_inputs(graph)(inputs)
        self.inputs = frozenset(self._env)
        self._makers: dict[int, Node] = {}  # by storage: the input or call that has made it
        for node, value in self._env.items():
            self._makers |= {read_key(t): node for t in tensors_in(value)}

    def run(self, node: Node) -> _Call:
        """Run a call and return what it does."""
        given = [t for each in node.all_input_nodes for t in tensors_in(self._env[each])]
        before = [t._version for t in given]
        with _Effects() as effects:
            out = self._env[node] = prepare_call(self._graph, node)(self._env)
        # Kernels on lists of tensors count no versions without values; custom ones may write without saying so.
        written = effects.written.union(read_key(t) for t, version in zip(given, before, strict=True) if t._version != version)
        changed = {self._makers[key] for key in written if key in self._makers}
        for t in tensors_in(out):
            self._makers.setdefault(read_key(t), node)
        changed.update(list_statistics(node))
        statistics = frozenset(_list_moved_inputs(node))
        reads = (each for each in node.all_input_nodes if each not in statistics)
        makers = {self._makers[read_key(t)] for each in reads for t in tensors_in(self._env[each])}
        return _Call(
            node=node,
            reads_inputs=self.inputs.intersection(makers),
            changes=frozenset(changed) - self.inputs,
            changes_inputs=self.inputs.intersection(changed),
            statistics=statistics,
            changes_setting=not changed and not isinstance(out, Tensor | tuple | list | int | float | bool),
            draws=effects.has_drawn,
        )


def prepare_inputs(graph: GraphModule) -> Callable[[Sequence[Any]], dict[Node, Any]]:
    """Return what gives the inputs and constants of a graph their values, and the numbers that follow from them."""
    numbers = find_numbers(graph.graph)
    nodes = [node for node in graph.graph.nodes if node.op in _INPUTS]
    calls = [(node, prepare_call(graph, node)) for node in graph.graph.nodes if node in numbers and node.op not in _INPUTS]

    def bind(inputs: Sequence[Any]) -> dict[Node, Any]:
        given, values = iter(inputs), dict[Node, Any]()
        for node in nodes:
            values[node] = next(given) if node.op == "placeholder" else get_attribute(graph, str(node.target))
        for node, call in calls:
            values[node] = call(values)
        return values

    return bind


def list_statistics(node: Node) -> list[Node]:
    """Return the running statistics that a call moves, perhaps without showing it. Its result does not depend on them then."""
    if node.op != "call_function" or node.target not in _STATISTICS:
        return []
    first, default = _STATISTICS[node.target]
    moves = node.args[5] if len(node.args) > 5 else node.kwargs.get("training", node.kwargs.get("use_input_stats", default))
    given = [*node.args[first : first + 2], node.kwargs.get("running_mean"), node.kwargs.get("running_var")]
    return [each for each in given if isinstance(each, Node)] if moves else []


def _list_moved_inputs(node: Node) -> list[Node]:
    return [each for each in list_statistics(node) if each.op in _INPUTS]


def read_key(tensor: Tensor) -> int:
    """Return what tells the memory of living tensors apart."""
    storage = tensor.untyped_storage()
    return (0 if isinstance(tensor, FakeTensor) else storage.data_ptr()) or storage._cdata


class _Effects(TorchDispatchMode):
    """Notices operations that draw random numbers, and the memory that they say they write to."""

    def __init__(self) -> None:
        super().__init__()
        self.has_drawn = False
        self.written = set[int]()

    @leave_uncompiled
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known, kwargs = describe_operation(func), kwargs or {}
        # A higher-order operation does not show what it calls.
        self.has_drawn |= isinstance(func, HigherOrderOperator) or known.draws(args, kwargs)
        written = tensors_in(known.list_written(args, kwargs))
        self.written.update(read_key(t) for t in written if t.layout is torch.strided)
        return func(*args, **kwargs)
