"""How long the calls of captured graphs take, measured on the module's device with its own parameters and batch.

A graph runs call by call, as it runs again in a recovery: the autograd graph of each call ends with it. A call's backward
runs right after its forward, so hardly more is alive than in evaluation, and even a module whose step does not fit can be
timed. Each round runs all calls once; the time of a call is the median over the rounds.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from revzoo.analysis.dry_run import call, isolated, memory_errors
from revzoo.analysis.kept_values import leave_kept_values
from revzoo.device import has_value
from revzoo.errors import InputError
from revzoo.graph.atoms import Atom, list_dead, prepare_calls, prepare_inputs, split_into_atoms
from revzoo.graph.capture import GraphCall
from revzoo.graph.compiled_call import CompiledCall
from revzoo.graph.digest import compute_digest
from revzoo.graph.recovery import cut
from revzoo.graph.refusal import explain_failures, require_plannable, uncompiled
from revzoo.planning.profiling.clock import Median, combine_spreads, find_median, make_clock, repeat
from revzoo.runtime.nested import map_tensors, tensors_in

_ROUNDS = 5  # at least, besides a first one that warms up
_NOTHING = Median(0.0, 0.0)


@dataclass(frozen=True)
class CallTimes:
    """What calls take.

    Args:
        forward: by atom.
        backward: by atom; 0 where there is none.
    """

    forward: Sequence[Median]
    backward: Sequence[Median]

    @property
    def step(self) -> Median:
        """All of a forward and backward that stores everything."""
        medians = [*self.forward, *self.backward]
        return Median(sum(median.seconds for median in medians), combine_spreads(medians))

    def in_nanoseconds(self) -> tuple[list[int], list[int]]:
        """Return the times of forward and backward, by atom."""
        forward, backward = ([round(median.seconds * 1e9) for median in each] for each in (self.forward, self.backward))
        return forward, backward


def measure_graphs(module: nn.Module, batch: Any) -> list[tuple[str, CallTimes]]:
    """Run a module's graphs a few times and return their digests and what their atoms take. The module is left as it was.

    Args:
        module: on the device where it will be trained.
        batch: what it is called with.
    Raises:
        InputError: there are no values to run with.
        MemoryError: not even the forward fits the memory.
    """
    if not all(map(has_value, (*module.parameters(), *tensors_in(batch)))):
        raise InputError("profile=True runs the module, which has no values here. Received: the meta device. Leave it out.")
    times: list[tuple[str, CallTimes]] = []

    def time_graph(graph: GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        def run(*inputs: Any) -> Any:
            measured, results = _time_atoms(graph, split_into_atoms(graph, inputs), inputs)
            times.append((compute_digest(graph, inputs), measured))
            return results

        return run

    require_plannable(module, batch)
    with memory_errors(), uncompiled(module), isolated(module, batch) as own_batch, explain_failures(module, own_batch):
        call(CompiledCall(module, time_graph), own_batch)
    return times


def assign_times(measured: Sequence[tuple[str, CallTimes]], calls: Sequence[GraphCall]) -> CallTimes:
    """Return the times of all atoms of a forward; what runs between graphs takes none.

    Raises:
        InputError: other graphs were timed.
    """
    if [digest for digest, _ in measured] != [each.digest for each in calls]:
        raise InputError("The module ran other operations when it was timed than when it was captured. Leave out profile=True.")
    forward, backward = [_NOTHING], [_NOTHING]
    for _, times in measured:
        forward += [*times.forward, _NOTHING]
        backward += [*times.backward, _NOTHING]
    return CallTimes(forward, backward)


def _time_atoms(graph: GraphModule, atoms: Sequence[Atom], inputs: Sequence[Any]) -> tuple[CallTimes, Any]:
    """Return what atoms take, and what the graph returns."""
    clock = make_clock(next((t.device for t in tensors_in(list(inputs))), torch.device("cpu")))
    bind, program, dead_after = prepare_inputs(graph), prepare_calls(graph, atoms), list_dead(atoms)
    forward: list[list[float]] = [[] for _ in atoms]
    backward: list[list[float]] = [[] for _ in atoms]
    env: dict[Node, Any] = {}

    def run() -> list[tuple[Any, ...]]:
        """Run everything once; return when every atom's forward began and ended, and its backward."""
        env.update((node, map_tensors(cut, value)) for node, value in bind(inputs).items())
        grad_mode, marks = torch.is_grad_enabled(), []
        for atom, calls, dead in zip(atoms, program, dead_after, strict=True):
            local = {node: env[node] for node in (*atom.reads, *atom.statistics)}
            wanted = {id(t): t for node in atom.reads for t in tensors_in(env[node]) if t.requires_grad}
            begin = clock.mark()
            for node, call_node in calls:
                local[node] = call_node(local)
            end = clock.mark()
            outputs = [t for node in atom.makes for t in tensors_in(local[node]) if t.grad_fn is not None]
            gradients = [torch.ones_like(t) for t in outputs]
            begin_backward = clock.mark()
            if outputs and wanted:
                torch.autograd.grad(outputs, list(wanted.values()), gradients, allow_unused=True)
            marks.append((begin, end, begin_backward, clock.mark()))
            env.update((node, map_tensors(cut, local[node])) for node in atom.makes)
            del local, outputs, gradients, wanted
            for node in dead:
                env.pop(node, None)
        torch.set_grad_enabled(grad_mode)
        return marks

    run()  # a warm-up
    with leave_kept_values():
        for _ in repeat(_ROUNDS, lambda: combine_spreads([find_median(samples) for samples in (*forward, *backward)])):
            for k, marks in enumerate(run()):
                forward[k].append(clock.measure(*marks[:2]))
                backward[k].append(clock.measure(*marks[2:]))
    (results,) = next(node for node in graph.graph.nodes if node.op == "output").args
    times = CallTimes([*map(find_median, forward)], [*map(find_median, backward)])
    return times, map_arg(results, env.__getitem__)
