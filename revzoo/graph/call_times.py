"""How long the calls of a captured graph take, measured on the module's device with its own parameters and batch.

The graph runs call by call, as it runs again in a recovery: the autograd graph of each call ends with it. A call's backward
runs right behind its forward, so that hardly more is alive than in evaluation, and a module can be timed whose step does not
fit. Each round runs all calls once; the time of a call is the median over the rounds.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from revzoo.analysis.dry_run import call, isolated
from revzoo.analysis.fake_tensors import find_fake_mode, has_values
from revzoo.errors import InputError
from revzoo.graph.atoms import Atom, bind_inputs, prepare_call, split_into_atoms
from revzoo.graph.capture import GraphCall
from revzoo.graph.captured_call import capture_calls, compute_digest
from revzoo.graph.refusal import explain_failures, require_uncompiled
from revzoo.planning.profiling.clock import Median, combine_spreads, find_median, make_clock, repeat
from revzoo.planning.profiling.timing import memory_errors
from revzoo.runtime.nested import map_tensors, tensors_in

_ROUNDS = 5  # at least, besides a first one that warms up


@dataclass(frozen=True)
class CallTimes:
    """What the calls of a graph take.

    Args:
        forward: by atom [nanoseconds].
        backward: by atom [nanoseconds]; 0 where there is none.
        spread: by how much of itself a time differs if it is measured again: the standard error of the medians.
    """

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    spread: float = 0.0

    @property
    def seconds(self) -> float:
        """Of a forward and backward that stores everything."""
        return (sum(self.forward) + sum(self.backward)) / 1e9


@dataclass(frozen=True)
class GraphTimes:
    """What one call of a captured graph takes.

    Args:
        digest: of the graph and its inputs.
        times: of its atoms.
    """

    digest: str
    times: CallTimes


def measure_graphs(module: nn.Module, batch: Any) -> list[GraphTimes]:
    """Run a module's graphs a few times and return what their atoms take. The module is left as it was.

    Args:
        module: on the device where it will be trained.
        batch: what it is called with.
    Raises:
        InputError: there are no values to run with.
        MemoryError: not even the forward fits the memory.
    """
    if not all(map(has_values, (*module.parameters(), *tensors_in(batch)))):
        raise InputError("profile=True runs the module, which has no values here. Received: the meta device. Leave it out.")
    times: list[GraphTimes] = []

    def time_graph(graph: GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        def run(*inputs: Any) -> Any:
            mode = find_fake_mode([], always=True)
            assert mode is not None
            with mode:
                fakes = [map_tensors(lambda t: mode.from_tensor(t.detach()).requires_grad_(t.requires_grad), i) for i in inputs]
                atoms = split_into_atoms(graph, fakes)
            program = _Program(graph, atoms)
            times.append(GraphTimes(compute_digest(graph, inputs), _time_program(program, inputs)))
            return program.results

        return run

    require_uncompiled(module)
    with explain_failures(module, batch), memory_errors(), isolated(module, batch) as own_batch:
        call(capture_calls(module, time_graph), own_batch)
    return times


def assign_times(measured: Sequence[GraphTimes], calls: Sequence[GraphCall]) -> CallTimes:
    """Return the times of all atoms of a forward; what runs between graphs takes none.

    Raises:
        InputError: other graphs were timed.
    """
    if [each.digest for each in measured] != [each.digest for each in calls]:
        raise InputError("The module ran other operations when it was timed than when it was captured. Leave out profile=True.")
    forward, backward = [0], [0]
    for each in measured:
        forward += [*each.times.forward, 0]
        backward += [*each.times.backward, 0]
    spread = combine_spreads([Median(each.times.seconds, each.times.spread) for each in measured])
    return CallTimes(tuple(forward), tuple(backward), spread)


def _time_program(program: "_Program", inputs: Sequence[Any]) -> CallTimes:
    clock = make_clock(next((t.device for t in tensors_in(list(inputs))), torch.device("cpu")))
    samples: list[tuple[list[float], list[float]]] = []  # by atom, forward and backward

    def run() -> Iterator[tuple[float, float]]:
        for forward, backward in list(program.run(inputs, clock.mark)):
            yield clock.measure(*forward), clock.measure(*backward)

    def list_medians(direction: int) -> list[Median]:
        return [find_median(each[direction]) for each in samples]

    samples += [([], []) for _ in run()]  # a warm-up
    for _ in repeat(_ROUNDS, lambda: combine_spreads([*list_medians(0), *list_medians(1)])):
        for each, (forward, backward) in zip(samples, run(), strict=True):
            each[0].append(forward)
            each[1].append(backward)
    forwards, backwards = list_medians(0), list_medians(1)
    return CallTimes(
        forward=tuple(round(median.seconds * 1e9) for median in forwards),
        backward=tuple(round(median.seconds * 1e9) for median in backwards),
        spread=combine_spreads([*forwards, *backwards]),
    )


class _Program:
    """A graph that runs atom by atom, each with its backward."""

    def __init__(self, graph: GraphModule, atoms: Sequence[Atom]):
        self._graph, self._atoms = graph, atoms
        self.results: Any = None  # of the latest run
        self._calls = [[(node, prepare_call(graph, node)) for node in atom.nodes] for atom in self._atoms]
        number = {node: i for i, atom in enumerate(self._atoms) for node in atom.nodes}
        self._dead_after: list[list[Node]] = [[] for _ in self._atoms]
        for atom in self._atoms:
            for node in atom.makes:
                last = max(number.get(user, len(number)) for user in node.users)
                if last < len(number):
                    self._dead_after[last].append(node)

    def run(self, inputs: Sequence[Any], now: Callable[[], Any]) -> Iterator[tuple[tuple[Any, Any], tuple[Any, Any]]]:
        """Run everything once; yield when every atom's forward began and ended, and its backward."""
        env = {node: map_tensors(_cut, value) for node, value in bind_inputs(self._graph, inputs)}
        grad_mode = torch.is_grad_enabled()
        for atom, calls, dead in zip(self._atoms, self._calls, self._dead_after, strict=True):
            local = {node: env[node] for node in (*atom.reads, *atom.statistics)}
            wanted = {id(t): t for node in atom.reads for t in tensors_in(env[node]) if t.requires_grad}
            forward = [now()]
            for node, run in calls:
                local[node] = run(local)
            forward.append(now())
            outputs = [t for node in atom.makes for t in tensors_in(local[node]) if t.grad_fn is not None]
            gradients = [torch.ones_like(t) for t in outputs]
            backward = [now()]
            if outputs and wanted:
                torch.autograd.grad(outputs, list(wanted.values()), gradients, allow_unused=True)
            backward.append(now())
            yield (forward[0], forward[1]), (backward[0], backward[1])
            env |= {node: map_tensors(_cut, local[node]) for node in atom.makes}
            del local, outputs, gradients, wanted
            for node in dead:
                del env[node]
        torch.set_grad_enabled(grad_mode)
        (results,) = next(node for node in self._graph.graph.nodes if node.op == "output").args
        self.results = map_arg(results, env.__getitem__)


def _cut(tensor: Tensor) -> Tensor:
    """Return a tensor without the graph that has made it."""
    return tensor if tensor.grad_fn is None else tensor.detach().requires_grad_(tensor.requires_grad)
