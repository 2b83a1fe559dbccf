"""The forward of a module for one batch: calls of captured graphs, one after the other, and the code between them.

Mostly it is one call of one graph. `torch.compile` ends a graph where it cannot follow the code, at a `print` or a reversible
chain for example, and begins another after it. What stands between is run as it is, and stores what it stores. The compiler
checks its guards at every call, and hands over other graphs where shapes, dtypes or flags are others.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast
from weakref import proxy

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, GraphModule, Node

from revzoo.analysis.autocast import leave_autocast
from revzoo.analysis.dry_run import LossFunction, call, compute_loss, isolated, mark_python_streams, require_module
from revzoo.device import has_value
from revzoo.errors import InputError
from revzoo.graph.assumption import assuming
from revzoo.graph.atoms import Atom, list_written, read_key, split_into_atoms
from revzoo.graph.compiled_call import CompiledCall, Runner
from revzoo.graph.digest import SharedInputs, compute_digest, find_shared
from revzoo.graph.refusal import (
    describe_backward_hooks,
    explain_failures,
    require_arguments,
    require_followable,
    require_plannable,
    require_results,
    uncompiled,
)
from revzoo.runtime.live_bytes import LiveBytesOfReplacedCalls
from revzoo.runtime.nested import tensors_in
from revzoo.runtime.random_state import RandomState, find_generators

RunGraph = Callable[[int, Sequence[Any]], Any]
_COMPUTED = (
    "It reads the values of tensors, or has sparse ones, so that planning had to compute training steps on the module's device."
)


@dataclass(frozen=True)
class GraphCall:
    """One call of a captured graph.

    Args:
        graph: of torch calls; parameters and buffers are inputs. No other call has the same nodes.
        atoms: of the graph.
        digest: of the graph and its inputs.
        shared: which inputs lie in one memory, where the graph writes to some of them.
        first: number of its first atom. Atoms are counted through the whole forward; what runs before each graph counts as
            one, and so does what runs after the last.
    """

    graph: GraphModule
    atoms: Sequence[Atom]
    digest: str
    shared: SharedInputs
    first: int

    @property
    def numbers(self) -> range:
        """The numbers of its atoms."""
        return range(self.first, self.first + len(self.atoms))


class Capture:
    """A module whose captured graphs run as one says.

    Args:
        module, batch: as `isolated` has prepared them.
        notes: remarks for the reader of a plan.
    """

    def __init__(self, module: nn.Module, batch: Any, notes: Sequence[str] = ()):
        self.calls: list[GraphCall] = []
        self.notes = tuple(notes)
        self.module, self._batch = module, batch
        self._others: dict[int, tuple[Tensor, Tensor]] = {}  # what graphs read besides, by identity, with a copy of it
        self._keys: list[dict[Node, int]] = []  # which memory the inputs of each call have
        self._graphs: list[GraphModule] = []  # as they are called; one may be called several times
        self._position = 0
        self._random = RandomState(find_generators({t.device for t in self.tensors})), mark_python_streams()
        self._run_graph: RunGraph = self._note_and_run
        self._runner = CompiledCall(module, partial(Capture._take, cast(Capture, proxy(self))))
        self._made = LiveBytesOfReplacedCalls()  # in the first run

    def begin(self) -> None:
        """Run the forward for the first time, and note its graphs."""
        with self._made:
            self._made.watch(self.tensors)
            require_results(self.module, self.run(self._note_and_run))
        self._runner.assumes = self._runner.assumed
        written = set[int]()  # memory that later graphs write to: what has read it would read something else the second time
        for i, (each, keys) in reversed([*enumerate(zip(self.calls, self._keys, strict=True))]):
            stale = {node for node, key in keys.items() if key in written}
            atoms = [replace(a, is_repeatable=a.is_repeatable and stale.isdisjoint(a.reads)) for a in each.atoms]
            self.calls[i] = replace(each, atoms=atoms)
            written |= {keys[node] for node in list_written(each.atoms) if node in keys}

    def close(self) -> None:
        """Free what was captured."""
        self._runner.forget()

    @property
    def tensors(self) -> list[Tensor]:
        """Parameters, buffers, batch, and copies of the other tensors that graphs read: attributes, constants."""
        others = (copy for _, copy in self._others.values())
        return [*self.module.parameters(), *self.module.buffers(), *tensors_in(self._batch), *others]

    @property
    def assumes(self) -> bool:
        """Whether graphs hold as long as what they assume of the values of the batch is so."""
        return self._runner.assumes

    @property
    def num_atoms(self) -> int:
        """The number of atoms of the whole forward."""
        return sum(len(each.atoms) + 1 for each in self.calls) + 1

    def run(self, run_graph: RunGraph) -> Any:
        """Call the module and return what it returns.

        Args:
            run_graph: runs a call of a graph, given as its place in `calls`, with its inputs.
        Raises:
            InputError: the module calls other graphs than at first.
        """
        self._run_graph = run_graph
        outputs = self._run(self._runner)
        if self._position != len(self.calls):
            raise self._differs()
        return outputs

    def run_own_code(self) -> Any:
        """Call the module without its graphs and return what it returns."""
        with assuming(self.assumes):
            return self._run(self.module)

    def run_step(
        self, forward: Callable[[], Any], loss: LossFunction | None, end_forward: Callable[[], object] = lambda: None
    ) -> Tensor:
        """Run forward, loss and backward, and return the loss, which training loops hold as well.

        Args:
            forward: returns what the module returns.
            loss: computes the loss from that; None is a sum, which keeps nothing for backward.
            end_forward: called where forward ends.
        """
        outputs = forward()
        end_forward()
        total = compute_loss(loss, outputs)
        del outputs
        with leave_autocast():
            total.backward()
        return total

    def _run(self, runner: Callable[..., Any]) -> Any:
        for each in self.tensors:
            each.grad = None
        torch_streams, rewind_python_streams = self._random
        torch_streams.rewind()  # every run draws the same numbers
        rewind_python_streams()
        torch.clear_autocast_cache()  # every run casts the weights
        self._position = 0
        return call(runner, self._batch)

    def _take(self, graph: GraphModule, _: Sequence[Any]) -> Runner:
        def run(*given: Any) -> Any:
            at, self._position = self._position, self._position + 1
            given = tuple(map(self._replace, given))
            if at == len(self._graphs) and self._run_graph == self._note_and_run:
                self._graphs.append(graph)
            elif at >= len(self._graphs) or not self._is_same(graph, at, given):
                raise self._differs()
            return self._run_graph(at, given)

        return run

    def _replace(self, given: Any) -> Any:
        """Return a copy of a tensor that is not made in forward: it has no value of its own here, and gets the gradient."""
        if not isinstance(given, Tensor):
            return given
        is_first_run = self._run_graph == self._note_and_run
        if is_first_run and id(given) not in self._others and not self._made.find(given):
            detached = given.detach()  # a FakeTensor where nothing is computed
            copy = detached if isinstance(detached, FakeTensor) else detached.clone()
            self._others[id(given)] = given, copy.requires_grad_(given.requires_grad)
        return self._others.get(id(given), (given, given))[1]

    def _is_same(self, graph: GraphModule, at: int, given: Sequence[Any]) -> bool:
        """Return whether a graph is that of a call, or equal: a forward that notes something once is captured twice."""
        if graph is not self._graphs[at]:
            if compute_digest(graph, given) != self.calls[at].digest:
                return False
            self._graphs[at] = graph
        return True

    def _note_and_run(self, at: int, given: Sequence[Any]) -> Any:
        graph = self._graphs[at]
        require_followable(self.module, graph)
        if any(graph is each for each in self._graphs[:at]):
            graph = _copy(graph)
        atoms = split_into_atoms(graph, given)
        first = self.calls[-1].numbers.stop + 1 if self.calls else 1
        placeholders = graph.graph.find_nodes(op="placeholder")
        pairs = zip(placeholders, given, strict=True)
        self._keys.append({node: read_key(t) for node, t in pairs if isinstance(t, Tensor) and t.layout is torch.strided})
        shared = find_shared(placeholders, given, atoms)
        self.calls.append(GraphCall(graph, atoms, compute_digest(graph, given), shared, first))
        return graph.forward(*given)

    def _differs(self) -> InputError:
        remedy = (
            "If its first call fills a cache, call it once before planning. Plan a submodule that runs the same operations "
            "every time otherwise."
        )
        return InputError(
            f"Two calls of {type(self.module).__name__} with the same batch ran other operations: its forward depends on "
            f"what it remembers. {next(describe_backward_hooks(self.module), remedy)}"
        )


@contextmanager
def capture(module: nn.Module, batch: Any, *, with_values: bool = False) -> Iterator[Capture]:
    """Yield the captured forward of a module for a batch, and leave the module as it was.

    Nothing is computed or allocated inside, unless forward reads the values of tensors or the size of some depends on them.

    Args:
        module: any, set up as it will be trained.
        batch: a tensor, a tuple or list of positional arguments, or a mapping of keyword arguments.
        with_values: compute in any case, because backward or the loss reads values.
    Raises:
        InputError: no module, an unusable batch, no parameter with a gradient, a compiled module, or a forward that runs other
            operations from call to call, or needs values that there are not.
    """
    require_module(module)
    require_plannable(module, batch)
    with uncompiled(module):
        yield from _capture(module, batch, with_values)


def _capture(module: nn.Module, batch: Any, with_values: bool) -> Iterator[Capture]:
    tensors = [*module.parameters(), *module.buffers(), *tensors_in(batch)]
    if not with_values and all(t.layout is torch.strided for t in tensors):  # the size of others depends on values
        with isolated(module, batch, fake=True) as fake_batch, closing(Capture(module, fake_batch)) as captured:
            require_arguments(module, batch)
            if _begin_without_values(captured):
                yield captured
                return
    if not all(map(has_value, [*module.parameters(), *tensors_in(batch)])):
        raise InputError(
            f"A step of {type(module).__name__} cannot run without values: it reads the values of tensors, and may decide by "
            "them what to compute, or has sparse ones. Give module and batch values, or plan a submodule that needs none."
        )
    with isolated(module, batch) as own_batch, closing(Capture(module, own_batch, [_COMPUTED])) as captured:
        require_arguments(module, batch)
        with explain_failures(module, own_batch):
            captured.begin()
        yield captured


def _begin_without_values(captured: Capture) -> bool:
    try:
        captured.begin()
    except InputError:
        raise
    except Exception:  # many kinds are possible; if it is a real mistake, the run with values raises it again
        return False
    return True


def _copy(graph: GraphModule) -> GraphModule:
    """Return the graph with nodes of its own."""
    copied = Graph()
    output = copied.graph_copy(graph.graph, {})
    copied.output(output)
    return GraphModule(graph, copied)
