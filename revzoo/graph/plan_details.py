"""What a planned step of any module does, call by call: for tables and pictures."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from torch.fx import Node

from revzoo.analysis.dry_run import leave_autocast
from revzoo.graph.call_times import CallTimes
from revzoo.graph.capture import Capture, GraphCall
from revzoo.graph.front import Front
from revzoo.graph.recovery import Slot
from revzoo.graph.refusal import compute_loss
from revzoo.graph.span_choices import FLOPS_PER_BYTE
from revzoo.graph.spanned_graph import SpannedGraph
from revzoo.graph.spans import Spans
from revzoo.graph.step_record import Loss, Record
from revzoo.runtime.live_bytes import LiveBytes, LiveBytesOfReplacedCalls

PhaseKind = Literal["forward", "loss", "recovery", "backward"]
_Event = tuple[PhaseKind, int, int]  # what begins in which call, and when, as a position in a log
_BACKWARD = 2  # the work of a call's backward, over that of its forward
_POINTS = 32  # of a front: enough for a smooth curve


@dataclass(frozen=True)
class CallDetails:
    """One call of a module's graph, or a few that run together.

    Args:
        name: path of the submodule and function: `layer1.0.conv2 (conv2d)`.
        flops: of its forward.
        kept_bytes: of what it makes and is kept from forward to backward.
        dropped_bytes: of what it makes, backward needs, and is made again.
        num_reruns: how many times it runs again in backward.
    """

    name: str
    flops: int
    kept_bytes: int
    dropped_bytes: int
    num_reruns: int

    @property
    def path(self) -> str:
        """The submodule's path; empty for a call of the module itself."""
        path, found, _ = self.name.rpartition(" (")
        return path if found else ""


@dataclass(frozen=True)
class Phase:
    """A stretch of a step.

    Args:
        kind: "recovery" is the second run of a call in backward.
        call: number of the call; -1 for the loss.
        bytes: the peak of all memory in it.
        work: nanoseconds where calls were timed, else FLOPs with moved bytes at 16 each; of a backward twice that of forward.
    """

    kind: PhaseKind
    call: int
    bytes: int
    work: int


@dataclass(frozen=True)
class FrontPoint:
    """The memory and work of a plan for another budget.

    Args:
        peak_bytes: peak of all memory together.
        extra_flops: of one forward and backward, beyond those of storing everything.
        extra_seconds: likewise; None where nothing was timed.
    """

    peak_bytes: int
    extra_flops: int
    extra_seconds: float | None


@dataclass(frozen=True)
class PlanDetails:
    """What a planned step does, and what plans for other budgets take.

    Args:
        calls: of the graph, in order.
        phases: of the step, in order.
        front: plans for other budgets, by rising peak; the last stores everything.
        fixed_bytes: weights, buffers, batch and optimizer state.
    """

    calls: tuple[CallDetails, ...]
    phases: tuple[Phase, ...]
    front: tuple[FrontPoint, ...]
    fixed_bytes: int


def describe_step(
    captured: Capture,
    step: Record,
    spans: Sequence[Spans],
    loss: Loss | None,
    front: Front,
    other_bytes: int,
    times: CallTimes | None = None,
) -> PlanDetails:
    """Return what a step with these spans does. Nothing is computed.

    Args:
        captured: the module, inside its `capture`.
        step: its record.
        spans: what is kept of every call of a graph, and what runs again.
        loss: computes the loss from what the module returns; None is a sum.
        front: of all plans.
        other_bytes: alive during the whole step, beside what the record knows.
        times: of the calls.
    """
    events, log, programs = _trace(captured, spans, loss)
    made = [0] * len(step.atoms)
    for storage in step.storages:
        made[storage.born] += storage.bytes
    if times is None:
        forward = [flops + FLOPS_PER_BYTE * size for flops, size in zip(step.flops, made, strict=True)]
        backward = [_BACKWARD * each if at >= 0 else 0 for each, at in zip(forward, step.first_unpack, strict=True)]
    else:
        forward, backward = list(times.forward), list(times.backward)
    phases, waiting = [], backward[:]
    for (kind, call, start), (_, _, end) in zip(events, [*events[1:], ("end", -1, len(log))], strict=True):
        work = 0
        if call >= 0:
            work = forward[call] if kind != "backward" else waiting[call]
            waiting[call] = 0 if kind == "backward" else waiting[call]  # it may ask for saved tensors several times
        phases.append(Phase(kind, call, max(log[start : end + 1], default=0) + other_bytes, work))
    reruns = [0] * len(step.atoms)
    for phase in phases:
        reruns[phase.call] += phase.kind == "recovery"
    kept, dropped = _count_kept(step, captured.calls, programs)
    calls = zip((atom.name for atom in step.atoms), step.flops, kept, dropped, reruns, strict=True)
    return PlanDetails(
        calls=tuple(CallDetails(*each) for each in calls),
        phases=tuple(phases),
        front=_list_front(front, other_bytes, times is not None),
        fixed_bytes=step.fixed_bytes + other_bytes,
    )


def list_reruns(captured: Capture, spans: Spans, loss: Loss | None) -> list[int]:
    """Return the calls that run again in backward with these spans of the whole forward, each as often as it does."""
    of_graphs = [spans.take(each.numbers) for each in captured.calls]
    return [call for kind, call, _ in _trace(captured, of_graphs, loss)[0] if kind == "recovery"]


class _Listener:
    """The observer that notes when the calls of one graph run, run again and are differentiated."""

    def __init__(self, live: LiveBytes, events: list[_Event], first: int):
        self._live, self._events, self._first = live, events, first

    def begin(self, atom: int) -> None:
        self._note("forward", atom)

    def end(self, atom: int, saved: Sequence[Slot], made: Any) -> None: ...

    def unpack(self, slot: Slot) -> None:
        if self._events[-1][:2] != ("backward", self._first + slot.atom):
            self._note("backward", slot.atom)

    def listen_to_calls(self, program: SpannedGraph) -> None:
        """Have the calls of a program noted when they run again."""
        for i, calls in enumerate(program.calls):
            node, run = calls[0]
            calls[0] = node, partial(self._begin_again, i, run)
            node, run = calls[-1]
            calls[-1] = node, partial(self._end_again, run)

    def _begin_again(self, atom: int, run: Callable[[Any], Any], env: Any) -> Any:
        if self._events[-1][0] != "forward":
            self._note("recovery", atom)
        return run(env)

    def _end_again(self, run: Callable[[Any], Any], env: Any) -> Any:
        result = run(env)
        before = next((event for event in reversed(self._events) if event[0] != "recovery"), None)
        if before is not None and before[0] == "backward":  # which goes on where it was
            self._events.append((*before[:2], self._live.now()))
        return result

    def _note(self, kind: PhaseKind, atom: int) -> None:
        self._events.append((kind, self._first + atom, self._live.now()))


def _trace(captured: Capture, spans: Sequence[Spans], loss: Loss | None) -> tuple[list[_Event], list[int], list[SpannedGraph]]:
    """Return what begins when, as positions in a log, the bytes alive at each of these, and the graphs that were run."""
    live = LiveBytesOfReplacedCalls()
    events: list[_Event] = []
    listeners = [_Listener(live, events, each.first) for each in captured.calls]
    programs = [SpannedGraph(c.graph, s, each) for c, s, each in zip(captured.calls, spans, listeners, strict=True)]
    for program, listener in zip(programs, listeners, strict=True):
        listener.listen_to_calls(program)

    def run_graph(at: int, inputs: Sequence[Any]) -> Any:
        results = programs[at](*inputs)
        events.append(("forward", captured.calls[at].numbers.stop, live.now()))
        return results

    with live:
        live.watch(captured.tensors)
        events.append(("forward", 0, live.now()))
        outputs = captured.run(run_graph)
        events.append(("loss", -1, live.now()))
        total = compute_loss(loss, outputs)
        del outputs
        with leave_autocast():
            total.backward()
        del total
    alive, total_bytes = [0], 0
    for _, change in live.log:
        total_bytes += change
        alive.append(total_bytes)
    return events, alive, programs


def _count_kept(step: Record, calls: Sequence[GraphCall], programs: Sequence[SpannedGraph]) -> tuple[list[int], list[int]]:
    """Return by call the bytes that are kept, and those that backward needs and are dropped."""
    kept, dropped = [0] * len(step.atoms), [0] * len(step.atoms)
    named = frozenset(node for each in programs for node in each.spans.kept)
    starts, inside, again = set[Node](), set[int](), set[int]()
    for call, program in zip(calls, programs, strict=True):
        inside |= {call.first + i for i in program.spans.kept_inside}
        for number, recipe in program.recipes.items():
            starts |= set(recipe.starts)
            if number >= 0 and not any(nest.first <= number < nest.end for nest in program.spans.nests):
                first = program.spans.ends[number - 1] if number else 0  # what ran before makes nothing small again
                again |= {call.first + i for i in recipe.atoms if i >= first}
    for storage in step.storages:
        between = not step.atoms[storage.born].nodes and storage.released >= 0
        small = storage.is_small and storage.born not in again
        unnamed = storage.maker is None and bool(storage.saved_by) and (storage.born in inside or small)
        fixed = any(not step.atoms[i].is_repeatable for i in storage.saved_by)
        nodes = named.intersection(storage.nodes)
        if between or unnamed or fixed or (nodes and (storage.saved_by or not starts.isdisjoint(nodes))):
            kept[storage.born] += storage.bytes
        elif storage.saved_by:
            dropped[storage.born] += storage.bytes
    return kept, dropped


def _list_front(front: Front, other_bytes: int, is_timed: bool) -> tuple[FrontPoint, ...]:
    points = front.list_points()
    rows = []
    for k in sorted({round(i * (len(points) - 1) / (_POINTS - 1)) for i in range(_POINTS)}):
        peak, _ = points[k]
        chosen = front.choose(peak)
        assert chosen is not None, "the peak is the front's own"
        seconds = sum(option.made for option in chosen) / 1e9 if is_timed else None
        rows.append(FrontPoint(peak + other_bytes, sum(option.flops for option in chosen), seconds))
    return tuple(rows)
