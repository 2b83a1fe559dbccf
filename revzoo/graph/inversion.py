"""Reversible chains in a joint graph: backward is made of states that it recovers itself.

The operator `undo` stands for each state of a chain, and says what the state before it is made of (`runtime/traced_chain.py`).
Forward keeps the last pair of states of a run of inverted steps. Backward begins the gradient of each step with a copy of its
function, on the state that is there by then, and recovers the state before it. So two states are alive at a time, and what one
step needs. What steps keep in other modes, and all that is outside of chains, is left to the compiler's partitioner.
"""

from bisect import bisect_left
from typing import Any, cast

import torch
from torch.fx import Graph, GraphModule, Node

from revzoo.graph.joint_graph import JointGraph, find_operation
from revzoo.graph.partition import Remaker
from revzoo.graph.shared_code import share_code
from revzoo.runtime.mode import Mode
from revzoo.runtime.operations import is_compute_intensive
from revzoo.runtime.traced_chain import BEGIN, undo

_UNDO = undo._opoverload
_CHOOSING = ("topk", "sort", "argmax", "argmin")  # results of which a rounding error may be others
_DIFFERS = (  # fewer than 255 characters, for CUDA
    "A reversible chain in exact arithmetic (exact=True, kept_bits) was rebuilt from others than its own states: a second "
    "run of a step, as compiled, rounds otherwise than the first. Compile with backend='aot_eager', or not at all."
)


def has_chains(graph: Graph) -> bool:
    """Return whether a reversible chain is in a graph."""
    return bool(graph.find_nodes(op="call_function", target=_UNDO))


def invert(joint: JointGraph, shares_code: bool = False) -> None:
    """Rewrite a joint graph so that its backward rebuilds what the chains in it drop.

    Args:
        joint: the graph.
        shares_code: whether both runs of a step in exact arithmetic call the same code.
    """
    inversion = _Inversion(joint)
    inversion.run()
    if shares_code:
        share_code(cast(GraphModule, joint.graph.owning_module), inversion.list_exact())


class _Inversion(Remaker):
    """The places are the numbers of the steps."""

    def __init__(self, joint: JointGraph):
        super().__init__(joint)
        marks = [(i, atom.nodes[0]) for i, atom in enumerate(joint.atoms) if atom.nodes[0].target is _UNDO]
        self._ends = [i for i, _ in marks]
        self._steps = [_Step(mark) for _, mark in marks]
        self._states = {name: step.state for step in self._steps for name in step.names}
        self._maker = {step.state: k for k, step in enumerate(self._steps)}
        self._undoer = {step.before: k for k, step in enumerate(self._steps) if step.mode == Mode.INVERT}
        self._run_on = {step.current for step in self._steps if step.mode == Mode.INVERT}
        self._recovered: dict[Node, Node] = {}
        self._inside: dict[Node, int] = {}  # by what a step computes: its number
        for i, atom in enumerate(joint.atoms):
            if (k := self._find_step(i)) is not None and self._steps[k].mode != Mode.STORE:
                self._inside |= dict.fromkeys(atom.nodes, k)
        self._kept = {each for step in self._steps for each in step.kept}
        self._kept |= {node for node in self._inside if self._is_kept(node)}

    def run(self) -> None:
        super().run()
        for step in self._steps:
            if "recompute" in step.state.meta:
                step.names[0].meta["recompute"] = step.state.meta["recompute"]
            step.state.replace_all_uses_with(step.names[0])
        self.joint.graph.eliminate_dead_code()

    def list_exact(self) -> list[dict[Node, Node]]:
        """Return for each step in exact arithmetic what of it runs twice, with its copy."""
        groups: dict[Any, dict[Node, Node]] = {}
        for (place, node), copied in self._copies.items():
            if node not in self._drawn:
                groups.setdefault(place, {})[node] = copied
        return [group for place, group in groups.items() if self._steps[place].is_equal is not None]

    def enter(self, owner: int, node: Node) -> int | None:
        k = self._find_step(owner)
        if k is not None and self._steps[k].mode == Mode.INVERT and self._steps[k].before in self._run_on:
            self.find(k, self._steps[k].before, node)
        return k

    def choose(self, place: Any, node: Node) -> Any:
        return place if self._inside.get(node) == place and node not in self._kept else None

    def find(self, place: Any, node: Node, before: Node) -> Node:
        while (known := self._states.get(node, self.results.get(node, node))) is not node:
            node = known
        if place is None or (node not in self._inside and node not in self._maker):
            return node
        if node not in self._undoer or self._steps[place].mode != Mode.INVERT:
            return super().find(place, node, before)
        if node not in self._recovered:
            self._recovered[node] = self._recover(node, before)
        return self._recovered[node]

    def save_state(self, node: Node) -> Node:
        result = super().save_state(node)
        self._inside[result] = self._inside[node]
        return result

    def _recover(self, state: Node, before: Node) -> Node:
        k = self._undoer[state]
        step, maker = self._steps[k], self._steps[self._maker[state]]
        recovered = self.find(k, step.back, before)
        is_oldest = maker.mode != Mode.INVERT or self._steps[self._maker[maker.current]].mode != Mode.INVERT
        if step.is_equal is not None and is_oldest:
            is_equal = self.find(k, step.is_equal, before)
            with self.joint.graph.inserting_before(before):
                check = self.joint.graph.call_function(torch.ops.aten._assert_async.msg, (is_equal, _DIFFERS))
            check.meta = {"val": None, "partitioner_tag": "must_be_in_backward"}
        return recovered

    def _find_step(self, atom: int) -> int | None:
        """Return the number of the step in which an atom of forward is, or for which; None outside of steps."""
        k = bisect_left(self._ends, atom)
        return None if k == len(self._ends) or self._steps[k].mode == BEGIN else k

    def _is_kept(self, node: Node) -> bool:
        """Return whether a step keeps what it computes: what is read outside of it, and what its mode keeps."""
        k, operation = self._inside[node], cast(Any, find_operation(node).target)
        if any(user.op == "output" or (user in self.atoms and self._inside.get(user) != k) for user in node.users):
            return node not in self._maker
        if self._steps[k].mode == Mode.SELECTIVE:
            return is_compute_intensive(operation)
        rounds = self._steps[k].mode == Mode.INVERT and self._steps[k].is_equal is None
        return rounds and getattr(operation, "_overloadpacket", operation).__name__ in _CHOOSING


class _Step:
    """What an `undo` in the graph says."""

    def __init__(self, state: Node):
        self.state = state
        after, self.back, self.before, self.current, self.is_equal, self.kept, self.mode = cast(Any, state.args)
        self.names = [after]  # of the state within its own step
        while self.names[-1].target is torch.ops.aten.detach.default:
            self.names.append(self.names[-1].args[0])
