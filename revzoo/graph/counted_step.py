"""A step with chosen spans, run in FakeTensors: its peak, its FLOPs, and what it does call by call, for tables and pictures."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

from revzoo.analysis.dry_run import LossFunction
from revzoo.analysis.flops import FLOPS_PER_BYTE, FlopCounterOfReplacedCalls
from revzoo.graph.call_times import CallTimes
from revzoo.graph.capture import Capture
from revzoo.graph.recovery import Observer, Slot
from revzoo.graph.spanned_graph import SpannedGraph
from revzoo.graph.spans import Spans
from revzoo.graph.step_record import Record
from revzoo.runtime.live_bytes import LiveBytes, LiveBytesOfReplacedCalls

PhaseKind = Literal["forward", "loss", "recovery", "backward"]
_BACKWARD = 2  # the work of a call's backward, over that of its forward


@dataclass(frozen=True)
class SpannedStep:
    """What a step takes and does.

    Args:
        peak_bytes: of all memory.
        flops: of forward and backward.
        events: what begins, in which atom (-1 for the loss), and when, as a position in `alive`.
        alive: bytes.
        kept: by atom, bytes of its tensors that are alive when backward first asks for something.
    """

    peak_bytes: int
    flops: int
    events: Sequence[tuple[PhaseKind, int, int]]
    alive: Sequence[int]
    kept: Mapping[int, int]

    @property
    def reruns(self) -> list[int]:
        """The atoms that run again in backward, each as often as it does."""
        return [atom for kind, atom, _ in self.events if kind == "recovery"]


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
        return self.name.rpartition(" (")[0]


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
        front: plans for other budgets, by rising peak; the last stores everything. Where everything fits, it is the only one.
        fixed_bytes: weights, buffers, batch and optimizer state.
        kept_bytes: what forward and loss have made when backward begins.
    """

    calls: tuple[CallDetails, ...]
    phases: tuple[Phase, ...]
    front: tuple[FrontPoint, ...]
    fixed_bytes: int
    kept_bytes: int


class _Tracer(Observer):
    """The observer that notes when calls run, run again and are differentiated."""

    def __init__(self, live: LiveBytes):
        self.events: list[tuple[PhaseKind, int, int]] = []
        self._live = live

    def note(self, kind: PhaseKind, atom: int) -> None:
        self.events.append((kind, atom, self._live.now()))

    def begin(self, atom: int) -> None:
        self.note("forward", atom)

    def unpack(self, atom: int, slot: Slot) -> None:
        if self.events[-1][:2] != ("backward", atom):
            self.note("backward", atom)

    def recover(self, atom: int) -> None:
        self.note("recovery", atom)


def count_step(captured: Capture, spans: Spans, loss: LossFunction | None = None) -> SpannedStep:
    """Run a training step with these spans of the whole forward. Nothing is computed, unless the module needs values.

    Args:
        captured: inside its `capture`.
        spans: of all atoms of the forward.
        loss: as for `record`.
    """
    live, flops = LiveBytesOfReplacedCalls(), FlopCounterOfReplacedCalls()
    tracer = _Tracer(live)
    programs = [SpannedGraph(each.graph, spans.take(each.numbers), tracer, each.first) for each in captured.calls]

    def run_graph(at: int, inputs: Sequence[Any]) -> Any:
        results = programs[at](*inputs)
        tracer.note("forward", captured.calls[at].numbers.stop)
        return results

    with flops, live:
        live.watch(captured.tensors)
        tracer.note("forward", 0)
        captured.run_step(lambda: captured.run(run_graph), loss, lambda: tracer.note("loss", -1))
    starts = {atom: at for kind, atom, at in tracer.events if kind in ("forward", "loss")}
    backward = min((at for kind, _, at in tracer.events if kind == "backward"), default=live.now())
    kept = live.alive_by_birth([*starts.values()], (), backward)
    alive = [*accumulate((change for _, change in live.log), initial=0)]
    return SpannedStep(max(alive), flops.forward + flops.backward, tracer.events, alive, dict(zip(starts, kept, strict=True)))


def count_own_peak(captured: Capture, loss: LossFunction | None = None) -> int:
    """Return the peak of a training step of the module's own code: it holds its local variables until it returns."""
    with LiveBytes() as live:
        live.watch(captured.tensors)
        captured.run_step(captured.run_own_code, loss)
    return live.peak()


def describe_step(
    counted: SpannedStep, step: Record, front: Sequence[FrontPoint], other_bytes: int, times: CallTimes | None
) -> PlanDetails:
    """Return the phases and calls of a counted step, next to the plans for other budgets.

    Args:
        counted: with the chosen spans.
        step: the record of the module.
        front: the plans for other budgets.
        other_bytes: alive during the whole step, besides what the record knows.
        times: of the calls.
    """
    made, needed = [0] * len(step.atoms), [0] * len(step.atoms)
    for storage in step.storages:
        made[storage.born] += storage.bytes
        needed[storage.born] += storage.bytes if storage.saved_by else 0
    if times is None:
        forward = [flops + FLOPS_PER_BYTE * size for flops, size in zip(step.flops, made, strict=True)]
        backward = [_BACKWARD * each if at >= 0 else 0 for each, at in zip(forward, step.first_unpack, strict=True)]
    else:
        forward, backward = times.in_nanoseconds()
    phases = []
    ends = [*(start for _, _, start in counted.events[1:]), len(counted.alive)]
    for (kind, call, start), end in zip(counted.events, ends, strict=True):
        work = 0 if call < 0 else backward[call] if kind == "backward" else forward[call]
        if kind == "backward":
            backward[call] = 0  # it may ask for saved tensors several times
        phases.append(Phase(kind, call, max(counted.alive[start : end + 1]) + other_bytes, work))
    reruns = counted.reruns
    calls = (
        CallDetails(atom.name, flops, kept := counted.kept.get(i, 0), max(0, need - kept), reruns.count(i))
        for i, (atom, flops, need) in enumerate(zip(step.atoms, step.flops, needed, strict=True))
    )
    return PlanDetails(tuple(calls), tuple(phases), tuple(front), step.fixed_bytes + other_bytes, sum(counted.kept.values()))
