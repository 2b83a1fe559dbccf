"""A plan of any module as a picture: memory over one training step, what is kept and runs again, and other budgets.

The axis of a step is its work, so that what runs again takes the width that it costs.
"""

from collections.abc import Sequence
from itertools import accumulate, groupby
from pathlib import Path

from matplotlib.axes import Axes

from revzoo.display.figures.base import LEFT, draw_heading, save
from revzoo.display.figures.modes import Label, draw_labels, draw_legend, find_labels_height
from revzoo.display.figures.plan import GAP, RIGHT, describe_plan, draw_front, draw_memory, lay_out
from revzoo.display.style import INK, LIGHT_GREY, MODE_COLORS
from revzoo.graph.counted_step import CallDetails, Phase, PlanDetails
from revzoo.graph.module_plan import ModulePlan
from revzoo.graph.plan_table import name_parts
from revzoo.planning.comparison import SchedulePoint
from revzoo.runtime.mode import Mode

_SIDE, _STEP = 2.2, 6.0  # widths of both panels [inch]
_NARROWEST = 0.14  # part of a module that is named [inch]
_COLORS = {"keeps": MODE_COLORS[Mode.STORE], "again": MODE_COLORS[Mode.RECOMPUTE], "neither": LIGHT_GREY}
_MEANINGS = {
    "keeps": "keeps what backward needs of it",
    "again": "drops at least a part of that, and runs again in backward",
    "neither": "backward needs nothing that it makes",
}


def plot_module_plan(plan: ModulePlan, details: PlanDetails, path: str | Path) -> None:
    """Draw the memory of a training step with a plan, what is kept, and what other budgets would take; write a PNG.

    Args:
        plan: to be drawn.
        details: what its step does.
        path: of the picture.
    """
    phases = _merge(details.phases)
    edges = [0.0, *accumulate(phase.work for phase in phases)]
    inch = edges[-1] / _STEP
    parts = _find_parts(phases, details.calls, inch)
    below = find_labels_height(parts, inch)
    figure, memory, cells, names, beside = lay_out(LEFT + _STEP + GAP + _SIDE + RIGHT, _STEP, below, 0.5, _SIDE)
    work = plan.describe_work() if plan.drops_something else "everything is stored"
    draw_heading(figure, plan.setting.model, describe_plan(plan, work))
    (loss,) = (k for k, phase in enumerate(phases) if phase.kind == "loss")
    begin, end = edges[loss], edges[loss + 1]
    titles = {begin / 2: "forward", (end + edges[-1]) / 2: "backward, with what runs again"}
    runs = groupby(range(len(phases)), key=lambda k: phases[k].kind == "recovery")
    again = [(own[0], own[-1]) for is_again, run in runs if is_again and (own := list(run))]
    where = _name_phase(max(phases, key=lambda phase: phase.bytes), details)
    limits, sizes = (plan.budget_bytes, plan.no_recompute_peak_bytes), [phase.bytes for phase in phases]
    top = draw_memory(memory, sizes, edges, (begin, end), titles, limits, where, details.fixed_bytes, inch, again)
    _draw_cells(cells, phases, details.calls, edges, inch)
    draw_labels(names, parts, inch, edges[-1], below, mirrored=end)
    assert beside is not None
    _draw_other_budgets(beside, plan, details, top)
    used = set(map(classify, details.calls))
    draw_legend(figure, {_MEANINGS[kind]: color for kind, color in _COLORS.items() if kind in used}, len(used))
    save(figure, path)


def _merge(phases: Sequence[Phase]) -> list[Phase]:
    """Return phases without those of no work, whose peaks are those of their neighbours then. The loss gets a little width."""
    sliver = sum(phase.work for phase in phases) // 200
    merged: list[Phase] = []
    waiting = 0
    for phase in phases:
        work = sliver if phase.kind == "loss" else phase.work
        same = merged and merged[-1].kind == phase.kind
        if work:
            merged.append(Phase(phase.kind, phase.call, max(phase.bytes, waiting), work))
            waiting = 0
        elif same:
            last = merged.pop()
            merged.append(Phase(last.kind, last.call, max(last.bytes, phase.bytes), last.work))
        else:
            waiting = max(waiting, phase.bytes)
    return merged


def _name_phase(phase: Phase, details: PlanDetails) -> str:
    if phase.kind == "loss":
        return "at the loss"
    words = {"forward": "in forward of", "recovery": "in the second run of", "backward": "in backward of"}
    return f"{words[phase.kind]} {details.calls[phase.call].name}"


def classify(call: CallDetails) -> str:
    """Return what becomes of a call's results: "keeps", "again" or "neither"."""
    if call.num_reruns:
        return "again"
    return "keeps" if call.kept_bytes else "neither"


def _draw_cells(axes: Axes, phases: Sequence[Phase], calls: Sequence[CallDetails], edges: Sequence[float], inch: float) -> None:
    """Draw what becomes of every call's results below forward, and what runs again below backward."""
    for phase, start, end in zip(phases, edges, edges[1:], strict=False):
        kind = "again" if phase.kind == "recovery" else classify(calls[phase.call]) if phase.kind == "forward" else None
        if kind is not None:
            axes.axvspan(start, end, color=_COLORS[kind], lw=0)
    axes.set(xlim=(0, edges[-1]), ylim=(0, 1))
    axes.axis("off")
    axes.text(-0.1 * inch, 0.5, "results", fontsize=9, color=INK, ha="right", va="center")


def _find_parts(phases: Sequence[Phase], calls: Sequence[CallDetails], inch: float) -> list[Label]:
    """Return names of the module's parts below forward, with their left and right ends; the finest that fit."""
    forward = [phase for phase in phases if phase.kind == "forward"]
    room = sum(phase.work for phase in forward) / inch
    labels = name_parts([calls[phase.call].path for phase in forward], int(room / _NARROWEST))
    parts: list[Label] = []
    at = 0.0
    for label, run in groupby(zip(labels, forward, strict=True), key=lambda each: each[0]):
        end = at + sum(phase.work for _, phase in run)
        parts.append((label, at, end))
        at = end
    return [part for part in parts if part[2] - part[1] >= _NARROWEST * inch]


def _draw_other_budgets(axes: Axes, plan: ModulePlan, details: PlanDetails, top: float) -> None:
    """Draw peak against work of the plan, of other budgets, and of storing everything."""
    stored_seconds = plan.stored_seconds

    def summarize(peak: int, flops: int, seconds: float | None) -> SchedulePoint:
        total = None if seconds is None or stored_seconds is None else stored_seconds + seconds
        return {"peak_bytes": peak, "extra_flops": flops, "seconds": total}

    planned: SchedulePoint = {"peak_bytes": plan.peak_bytes, "extra_flops": plan.extra_flops, "seconds": plan.seconds}
    stored = summarize(plan.no_recompute_peak_bytes, 0, None if stored_seconds is None else 0.0)
    front = [summarize(point.peak_bytes, point.extra_flops, point.extra_seconds) for point in details.front]
    draw_front(axes, planned, plan.budget_bytes, front, {"all stored": stored}, top, plan.total_flops)
