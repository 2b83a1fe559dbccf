"""Peak bytes against FLOPs of ordinary networks: plans beside what PyTorch itself offers, all on the same network.

A point is one training step, counted without running it: the most bytes of activations and their gradients alive, without
weights, buffers, batch and parameter gradients, over those of the stored step; and its FLOPs over those of the stored step.
Plans are searched for these bytes and priced in FLOPs alone here, as the rivals are, and `planning_front.py` says how these
are counted:

    checkpoint per block      torch.utils.checkpoint around every block of the network
    activation_memory_budget  PyTorch's min-cut partitioner for every .05 of a budget, on the graph of `torch.compile`
"""

import re
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ordinary_networks import Network, list_networks
from planning_figure import plot_front
from planning_front import Point, count_point, cut_joint_graph
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from revzoo.analysis.dry_run import linear_loss
from revzoo.analysis.flops import FlopCounterOfReplacedCalls
from revzoo.graph.capture import Capture, capture
from revzoo.graph.front import Front, find_front
from revzoo.graph.span_choices import SpanOption
from revzoo.graph.spanned_graph import SpannedGraph
from revzoo.graph.spans import Spans
from revzoo.graph.step_record import Record, record
from revzoo.runtime.live_bytes import LiveBytesOfReplacedCalls

POINTS = 24  # counted of every front
BUDGETS = tuple(round(0.05 * i, 2) for i in range(1, 21))  # of activation_memory_budget


def measure_ordinary(quick: bool, report: Callable[[str], None] = print) -> dict[str, Any]:
    """Return the fronts of all networks, and how every point of a rival compares with the plan for its bytes."""
    results = {}
    for name, network in list_networks(quick).items():
        results[name] = data = measure_network(network, (0.5, 1.0) if quick else BUDGETS)
        least, rows = data["points"][0], data["rivals"]
        better = sum(row["plan_is_as_good"] for row in rows)
        report(f"{name}: least {least[0]:.4f} @ {least[1]:.4f}; {better} of {len(rows)} points of rivals beaten or equalled")
    rows = [(name, row) for name, data in results.items() for row in data["rivals"]]
    lost = [f"{name}: {row['method']} {row['setting']}" for name, row in rows if not row["plan_is_as_good"]]
    missed = [
        f"{name} @ {each['fraction']}"
        for name, data in results.items()
        for each in data["to_reach"]
        if each["plan"] is None or each["plan"] > each["flops"]
    ]
    over = max(each["counted_bytes"] / each["predicted_bytes"] for data in results.values() for each in data["counted"])
    return {
        "networks": results,
        "found": f"{len(rows) - len(lost)} of {len(rows)} points of rivals beaten or equalled; not: "
        f"{', '.join(lost) or 'none'}; to be reached and missed: {', '.join(missed) or 'none'}; counted over predicted at most "
        f"{over:.5f}",
        "met": not lost and not missed and over <= 1,
    }


def measure_network(network: Network, budgets: Sequence[float]) -> dict[str, Any]:
    """Return a network's front, counted, and every point of its rivals beside the plan for its bytes."""
    rivals = list(count_rivals(network, budgets))
    begin = time.process_time()
    with capture(network.make().train(), network.batch()) as captured:
        step = record(captured, with_parameter_gradients=False)
        front = find_front(step, count_flops_only=True)
        seconds = time.process_time() - begin
        counter = _Counter(captured, front, step)
        points = front.list_points()
        counted = [counter.count(need) for need, _ in points[:: max(1, len(points) // POINTS)]]
        stored, stored_flops = counter.stored
        rows = [_compare(point, counter.fit(point.activation_bytes), stored, stored_flops) for point in rivals]
        reached = []
        for fraction, flops in network.to_reach:
            plan = counter.fit(int(fraction * stored))
            reached.append({"fraction": fraction, "flops": flops, "plan": plan and plan["flops"] / stored_flops})
    return {
        "stored_bytes": stored,
        "fixed_bytes": step.fixed_bytes,
        "stored_flops": stored_flops,
        "search_seconds": seconds,
        "points": [(each["activation_bytes"] / stored, each["flops"] / stored_flops) for each in counted],
        "counted": counted,
        "to_reach": reached,
        "rivals": rows,
    }


class _Counter:
    """Counts the steps of plans of a captured network."""

    def __init__(self, captured: Capture, front: Front, step: Record):
        self._captured, self._front, self._step = captured, front, step
        self._known: dict[tuple[SpanOption, ...], tuple[int, int]] = {}
        self.stored = self._run([Spans.keep_all(each.atoms) for each in captured.calls])

    def count(self, room: int) -> dict[str, int] | None:
        """Return what the plan for a peak without parameter gradients takes; None if there is no plan."""
        chosen = self._front.choose(room)
        if chosen is None:
            return None
        key = tuple(chosen)
        if key not in self._known:
            spans = self._front.make_spans(chosen)
            self._known[key] = self._run([spans.take(each.numbers) for each in self._captured.calls])
        activations, flops = self._known[key]
        counted = activations + self._step.fixed_bytes
        return {"predicted_bytes": room, "counted_bytes": counted, "activation_bytes": activations, "flops": flops}

    def fit(self, most: int) -> dict[str, int] | None:
        """Return the plan with the fewest FLOPs that takes at most so many bytes of activations; None if there is none."""
        plan = self.count(self._step.fixed_bytes + most)
        assert plan is None or plan["activation_bytes"] <= most, "a plan takes no more than was predicted"
        return plan

    def _run(self, spans: Sequence[Spans]) -> tuple[int, int]:
        """Return the peak of a step without parameter gradients, weights, buffers and batch, and FLOPs."""
        captured = self._captured
        programs = [SpannedGraph(call.graph, each) for call, each in zip(captured.calls, spans, strict=True)]
        live, flops = LiveBytesOfReplacedCalls(), FlopCounterOfReplacedCalls()
        with flops, live:
            lasting = live.watch(captured.tensors)
            linear_loss(captured.run(lambda at, inputs: programs[at](*inputs))).backward()
            gradients = live.watch([t.grad for t in captured.tensors])
        return live.peak(without=lasting | gradients), flops.forward + flops.backward


def _compare(point: Point, plan: dict[str, int] | None, stored: int, stored_flops: int) -> dict[str, Any]:
    """Return a rival's point beside the plan for its bytes."""
    return {
        "method": point.method,
        "setting": point.setting,
        "fraction": point.activation_bytes / stored,
        "flops": point.flops / stored_flops,
        "planned_fraction": plan and plan["activation_bytes"] / stored,
        "planned_flops": plan and plan["flops"] / stored_flops,
        "plan_is_as_good": plan is not None and plan["flops"] <= point.flops,
    }


def count_rivals(network: Network, budgets: Sequence[float]) -> Iterator[Point]:
    """Yield the points of all rivals."""
    module, batch = network.make().train(), network.batch()
    count = put_checkpoints(module, network.blocks)
    yield count_point("checkpoint per block", f"{count} blocks", module, (batch,))
    with capture(network.make().train(), batch) as captured:
        (graph,) = (each.graph for each in captured.calls)
        given: list[Tensor] = []

        def note(_: int, inputs: Sequence[Any]) -> Any:
            given.extend(inputs)
            return graph.forward(*inputs)

        captured.run(note)
        yield from cut_joint_graph(lambda own, _: graph.forward(*own), given, [], False, budgets)


def put_checkpoints(module: nn.Module, blocks: str) -> int:
    """Put a checkpoint around every submodule whose name is of a pattern, and return their number."""
    found = [each for name, each in module.named_modules() if re.fullmatch(blocks, name)]
    for each in found:
        each.forward = partial(_call_checkpointed, each.forward)  # type: ignore[method-assign]
    assert found, "the pattern names no block"
    return len(found)


def _call_checkpointed(forward: Callable[..., Any], *args: Any, **options: Any) -> Any:
    own = [list(each) if isinstance(each, list) else each for each in args]  # a DenseNet's list grows later
    return checkpoint(forward, *own, use_reentrant=False, **options)


def draw_ordinary(data: dict[str, Any], folder: Path) -> None:
    """Write a picture of each network's front beside its rivals."""
    for name, net in data["networks"].items():
        stored = net["stored_bytes"]
        series: dict[str, list[tuple[int, float]]] = {"planned": [(int(at * stored), flops) for at, flops in net["points"]]}
        for row in net["rivals"]:
            series.setdefault(row["method"], []).append((int(row["fraction"] * stored), row["flops"]))
        series["all stored"] = [(stored, 1.0)]
        plot_front(series, folder / f"front_{name}.png", "FLOPs", f"Peak against FLOPs: {name}", "activations")
