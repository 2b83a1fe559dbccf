"""Peak bytes against FLOPs: plans beside what PyTorch itself offers, all on the same network.

A point of a front is one training step, counted without running it: the most bytes alive above weights, buffers and batch
(activations, their gradients, and those parameter gradients that exist by then), the same without parameter gradients, and
FLOPs. The baselines run the network as an ordinary one: nothing is inverted, the graph keeps what autograd saves.

    checkpoint per block      torch.utils.checkpoint around every block and transition, stem and head outside
    checkpoint, segments      the same over sqrt(n) segments of blocks, the last one stored
    activation_memory_budget  AOTAutograd's joint graph, cut by PyTorch's min-cut partitioner for a budget from 0.05 to 1;
                              both graphs are run node by node, and every tensor is freed after its last use
"""

import copy
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch._functorch.config as functorch_config
from comparison.net import make_transformer_block
from torch import Tensor, nn
from torch._functorch.aot_autograd import aot_function
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import revzoo
from revzoo.analysis.dry_run import isolated
from revzoo.analysis.flops import FlopCounter, count_flops
from revzoo.planning.solvers.problem import Problem
from revzoo.planning.solvers.schedule_totals import cost, list_phase_peaks, peak
from revzoo.planning.solvers.timeline import minimize_peak, solve_timeline
from revzoo.runtime import ReversibleChain
from revzoo.runtime.live_bytes import LiveBytes
from revzoo.runtime.nested import tensors_in

SHALLOW = [f"stages.{stage}.depth=1" for stage in range(3)]  # of revnet_digits
BUDGETS = (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)  # of activation_memory_budget
Network = nn.Module
Part = Callable[..., Any]  # a block or transition, from pair to pair


@dataclass(frozen=True)
class Point:
    """One training step.

    Args:
        method: "planned", or the baseline.
        setting: its budget, number of segments or mode.
        bytes: the most alive above weights, buffers and batch.
        activation_bytes: the same without parameter gradients.
        flops: of forward and backward.
        where: phase of the peak, for plans.
    """

    method: str
    setting: str
    bytes: int
    activation_bytes: int
    flops: int
    where: str = ""


def networks(quick: bool) -> Iterator[tuple[str, Network, tuple[Tensor, ...]]]:
    """Yield name, network and batch, without values."""
    depth, width, heads, tokens, batch = (2, 32, 2, 12, 2) if quick else (24, 192, 3, 197, 8)
    with torch.device("meta"):
        chain = ReversibleChain([step for _ in range(depth) for step in make_transformer_block(width, heads)])
        yield f"transformer, {depth} blocks", chain, torch.randn(2, batch, tokens, width).unbind()
    name, batch = ("revnet_digits", 2) if quick else ("revnet_104", 8)
    model = revzoo.create(name, overrides=SHALLOW if quick else None, device="meta")
    yield f"{name}, batch {batch}", model, (model.example_input(batch),)


def fronts(network: Network, batch: tuple[Tensor, ...], quick: bool) -> tuple[list[Point], Problem]:
    """Return the points of every method on a network, and the problem that was planned, with FLOPs as costs."""
    problem = revzoo.profile(network, batch, run=False).memory
    points = list(plan_points(network, batch, problem, 5 if quick else 40))
    for mode in ("store", "invert"):
        network.schedule = mode
        points.append(count_point({"store": "all stored", "invert": "all inverted"}[mode], mode, network, batch))
    network.schedule = "store"
    blocks = len(blocks_of(network))
    points.append(count_point("checkpoint per block", f"{blocks} blocks", Checkpointed(network, blocks, last=True), batch))
    for segments in sorted({max(2, math.isqrt(blocks)), math.isqrt(blocks - 1) + 1}):
        points.append(count_point("checkpoint, segments", f"{segments}", Checkpointed(network, segments), batch))
    for decomposed in (False,) if quick else (False, True):
        points += partition_points(network, batch, decomposed, (0.5, 1.0) if quick else BUDGETS)
    return points, problem


def count_point(method: str, setting: str, network: Network, batch: tuple[Tensor, ...], where: str = "") -> Point:
    """Count a step of a network as it is."""
    report = revzoo.measure_memory(network, batch)
    constant = report.weight_bytes + report.buffer_bytes + report.batch_bytes
    return Point(method, setting, report.peak_bytes - constant, report.activation_bytes, count_flops(network, batch), where)


def plan_points(network: Network, batch: tuple[Tensor, ...], problem: Problem, points: int) -> Iterator[Point]:
    """Plan for budgets evenly spaced from the smallest possible peak to that of storing everything; yield counted points."""
    smallest, modes = minimize_peak(problem)
    stored = peak(problem, ["store"] * len(modes))
    seen = set()
    for i in range(points):
        budget = smallest + (stored - smallest) * i // (points - 1)
        modes = solve_timeline(problem, budget) or modes
        if tuple(modes) not in seen:
            worst = max(list_phase_peaks(problem, modes), key=lambda phase: phase.bytes)
            network.schedule = modes
            yield count_point("planned", f"{budget}", network, batch, f"{worst.phase} {worst.name}")
        seen.add(tuple(modes))


class Checkpointed(nn.Module):
    """A reversible network run as an ordinary one, its blocks in segments under `torch.utils.checkpoint`.

    Args:
        segments: of as equal numbers of blocks as possible.
        last: whether the last segment is checkpointed too.
    """

    def __init__(self, network: Network, segments: int, last: bool = False):
        super().__init__()
        self.network = network
        blocks = blocks_of(network)
        ends = [len(blocks) * i // segments for i in range(segments + 1)]
        self._segments = [blocks[start:end] for start, end in pairwise(ends)]
        self._plain = 0 if last else 1

    def forward(self, *inputs: Tensor) -> Any:
        pair = inputs if isinstance(self.network, ReversibleChain) else self.network.split(self.network.stem(*inputs))
        for i, segment in enumerate(self._segments):
            plain = i >= len(self._segments) - self._plain
            pair = through(segment, *pair) if plain else checkpoint(through, segment, *pair, use_reentrant=False)
        return pair if isinstance(self.network, ReversibleChain) else self.network.head(self.network.fuse(*pair))


def blocks_of(network: Network) -> list[Part]:
    """Return the blocks and transitions of a network with additive couplings, each from pair to pair."""
    if isinstance(network, ReversibleChain):
        return [block(f, g) for f, g in zip(network.steps[::2], network.steps[1::2], strict=True)]
    parts: list[Part] = []
    for stage in network.stages:
        parts += [stage.transition] if hasattr(stage, "transition") else []
        parts += [block(each.f, each.g) for each in stage.blocks]
    return parts


def block(f: Part, g: Part) -> Part:
    """Return an additive block."""

    def run(x1: Tensor, x2: Tensor) -> tuple[Tensor, Tensor]:
        y1 = x1 + f(x2)
        return y1, x2 + g(y1)

    return run


def through(parts: Sequence[Part], *pair: Tensor) -> tuple[Tensor, ...]:
    """Return what some parts make of a pair."""
    for part in parts:
        pair = part(*pair)
    return pair


class _StopCompiling(Exception):
    """Raised when the graphs are there, since nothing is to be compiled."""


def partition_points(
    network: Network, batch: tuple[Tensor, ...], decomposed: bool, budgets: Sequence[float]
) -> Iterator[Point]:
    """Cut the joint graph of a network for each budget, with or without inductor's decompositions, and run both halves."""
    names = [name for name, _ in (*network.named_parameters(), *network.named_buffers())]

    def call(tensors: list[Tensor], inputs: list[Tensor]) -> Any:
        return functional_call(network, dict(zip(names, tensors, strict=True)), tuple(inputs))

    with isolated(network, batch, fake=True) as inputs:
        own = [*network.parameters(), *network.buffers()]
        yield from cut_joint_graph(call, own, list(tensors_in(inputs)), decomposed, budgets)


def cut_joint_graph(
    call: Callable[[list[Tensor], list[Tensor]], Any],
    own: list[Tensor],
    inputs: list[Tensor],
    decomposed: bool,
    budgets: Sequence[float],
) -> Iterator[Point]:
    """Cut the joint graph of a function of parameters with buffers, and of a batch, all FakeTensors, for each budget."""
    halves: list[tuple[Any, Any, int]] = []

    def partition(joint: Any, args: Any, *, num_fwd_outputs: int, **options: Any) -> Any:
        for budget in budgets:
            with functorch_config.patch(activation_memory_budget=budget), warnings.catch_warnings(action="ignore"):
                cut = min_cut_rematerialization_partition(
                    copy.deepcopy(joint), args, num_fwd_outputs=num_fwd_outputs, **options
                )
            halves.append((*cut, num_fwd_outputs))
        raise _StopCompiling

    table = select_decomp_table() if decomposed else None
    traced = aot_function(call, _itself, _itself, partition_fn=partition, decompositions=table)
    with suppress(_StopCompiling):
        traced(own, inputs)
    for budget, (forward, backward, outputs) in zip(budgets, halves, strict=True):
        yield Point(
            "activation_memory_budget",
            f"{budget}{', decomposed' if decomposed else ''}",
            *run_halves(forward, backward, outputs, own, inputs),
        )


def _itself(graph: Any, _: Any) -> Any:
    return graph


@torch.no_grad()
def run_halves(forward: Any, backward: Any, outputs: int, own: list[Tensor], inputs: list[Tensor]) -> tuple[int, int, int]:
    """Run both graphs node by node; return bytes, activation bytes and FLOPs as in `Point`.

    The loss and its gradient are alive in backward, as in the steps of plans.
    """
    live, flops = LiveBytes(), FlopCounter()
    with flops, live:
        lasting = live.watch(own) | live.watch(inputs)
        made = list(torch.fx.Interpreter(forward).boxed_run([t.detach() for t in (*own, *inputs)]))
        saved = made[outputs:]
        del made  # the loss keeps nothing of the outputs, and the statistics of norms go to their buffers
        wanted = [node for node in backward.graph.nodes if node.op == "placeholder"]
        tangents = [torch.ones_like(node.meta["val"]) for node in wanted if node.name.startswith("tangents")]
        assert len(saved) + len(tangents) == len(wanted), "the halves do not fit each other"
        loss_and_gradient = [tangents[0].new_ones(()) for _ in range(2)]
        given = [*saved, *tangents]
        del saved, tangents
        gradients = live.watch(t for t in torch.fx.Interpreter(backward).boxed_run(given) if isinstance(t, Tensor))
        del loss_and_gradient
    return live.peak(without=lasting), live.peak(without=lasting | gradients), flops.forward + flops.backward


def compare_with_plans(points: Sequence[Point], problem: Problem) -> dict[str, dict[str, Any]]:
    """Return how every baseline compares with the plans for its own peaks.

    Returns: for each method the number of points, settings of those that beat the plan for their bytes ("beats_plans"; it
        takes more FLOPs, or there is none), the number of those that take more FLOPs than that plan or, at as many, more bytes
        ("plan_is_better"), and for each setting both ratios and the FLOPs of the plan over storing everything.
    """
    stored = next(point for point in points if point.method == "all stored")
    plans = [point for point in points if point.method == "planned"]
    comparisons = {}
    for method in dict.fromkeys(point.method for point in points):
        if method in ("planned", "all stored"):
            continue
        rows, losses, wins = [], [], 0
        for other in (point for point in points if point.method == method):
            modes = solve_timeline(problem, problem.fixed_bytes + other.bytes)
            plan = None
            if modes is not None:
                plan = peak(problem, modes) - problem.fixed_bytes, stored.flops + cost(problem, modes)
            if plan is None or plan[1] > other.flops:
                losses.append(other.setting)
            elif plan != (other.bytes, other.flops):
                wins += 1
            rows.append(
                {
                    "setting": other.setting,
                    "bytes": other.bytes / stored.bytes,
                    "flops": other.flops / stored.flops,
                    "planned_bytes": plan and plan[0] / stored.bytes,
                    "planned_flops": plan and plan[1] / stored.flops,
                    "activation_bytes": other.activation_bytes / stored.activation_bytes,
                    "planned_flops_for_activations": min(
                        (p.flops / stored.flops for p in plans if p.activation_bytes <= other.activation_bytes), default=None
                    ),
                }
            )
        comparisons[method] = {"points": len(rows), "beats_plans": losses, "plan_is_better": wins, "rows": rows}
    return comparisons
