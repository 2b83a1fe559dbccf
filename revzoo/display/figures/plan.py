"""A plan as a picture: memory over one training step, the mode of every unit, and what other budgets would take.

Every function draws what it is given and nothing else, so that the data written next to a picture is all there is in it.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from revzoo.display.figures.base import LEFT, draw_heading, mark_bytes, new_figure, save, simplify_axes
from revzoo.display.figures.modes import (
    CHARACTER,
    draw_labels,
    draw_mode_cells,
    draw_mode_legend,
    find_labels_height,
    label_units,
    mode_legend_height,
)
from revzoo.display.style import BLUE, CREAM, GREY, INK, LIGHT_BLUE, LIGHT_ORANGE, MODE_COLORS, PALE, RED
from revzoo.display.unit_name import parse_unit_name
from revzoo.format import format_bytes, format_flops, format_seconds
from revzoo.planning.comparison import SchedulePoint, summarize_plan
from revzoo.planning.plan import Plan
from revzoo.runtime.mode import Mode

RIGHT, GAP = 0.3, 0.25  # margins after the last axes and between axes [inch]
_PHASE, _MIN_WIDTH, _MAX_WIDTH = 0.1, 4.8, 8.0  # width of a phase, and the limits for all phases together [inch]


def plot_plan(
    plan: Plan,
    path: str | Path,
    front: Sequence[SchedulePoint] = (),
    others: Mapping[str, SchedulePoint] | None = None,
    fixed_bytes: int = 0,
) -> None:
    """Draw the memory of a training step with a plan, the mode of every unit, and what other budgets would take; write a PNG.

    Args:
        plan: to be drawn.
        path: of the picture.
        front: the fastest schedules of other budgets; without any, the second panel is left out.
        others: schedules to mark next to them, by name.
        fixed_bytes: weights, batch and optimizer state, shaded at the bottom.
    """
    count = len(plan.phase_peaks)
    span = min(max(_PHASE * count, _MIN_WIDTH), _MAX_WIDTH)
    side = 2.2 if front else 0.0
    labels = label_units(plan.units, span / count)
    below = find_labels_height(labels, count / span)
    width = LEFT + span + (side + GAP if front else 0) + RIGHT
    figure, memory, cells, names, beside = lay_out(width, span, below, mode_legend_height(plan.schedule, width), side)
    draw_heading(figure, plan.setting.model, _plan_lines(plan, others or {}))
    top = _draw_memory(memory, plan, fixed_bytes, count / span)
    _draw_modes(cells, plan, span)
    draw_labels(names, labels, count / span, count, below, mirrored=len(plan.units) + 1)
    if beside is not None:
        draw_front(beside, summarize_plan(plan), plan.budget_bytes, front, others or {}, top)
    draw_mode_legend(figure, plan.schedule)
    save(figure, path)


def _plan_lines(plan: Plan, others: Mapping[str, SchedulePoint]) -> list[str]:
    stored = others.get("all stored")
    work = f"{format_flops(plan.extra_flops)} more than storing everything"
    if plan.seconds is not None:
        work = f"{format_seconds(plan.seconds)} for a forward and backward"
        if stored is not None and stored["seconds"]:
            ratio = plan.seconds / stored["seconds"] - 1
            work += f", {ratio:+.1%} against storing everything ({format_seconds(stored['seconds'])})"
    return describe_plan(plan, work + ", with look-ahead" * plan.lookahead)


def describe_plan(plan: Any, work: str) -> list[str]:
    """Return the lines below the heading: what a plan is for, and what it takes."""
    peak = f"peak {format_bytes(plan.peak_bytes)} of a budget of {format_bytes(plan.budget_bytes)}"
    return [plan.setting.describe(), f"{peak}: {work}"]


def _draw_memory(axes: Axes, plan: Plan, fixed_bytes: int, inch: float) -> float:
    """Draw the peak of every phase, and return the top of the axis."""
    count, n = len(plan.phase_peaks), len(plan.units)
    peak = max(plan.phase_peaks, key=lambda phase: phase.bytes)
    where = "at the loss" if peak.phase == "loss" else f"in {peak.phase} of {_short(peak.name)}"
    titles = {n / 2: "forward", n + 0.5: "loss", (n + 1 + count) / 2: "backward"}
    limits, sizes = (plan.budget_bytes, plan.no_recompute_peak_bytes), [phase.bytes for phase in plan.phase_peaks]
    return draw_memory(axes, sizes, range(count + 1), (n, n + 1), titles, limits, where, fixed_bytes, inch)


def lay_out(
    width: float, span: float, below: float, legend: float, side: float
) -> tuple[Figure, Axes, Axes, Axes, Axes | None]:
    """Return a figure with axes for memory, the cells and names below it, and other budgets beside it [inch]."""
    bottom, rise = legend + below + 0.4, 3.2
    height = bottom + rise + 1.35
    figure = new_figure(width, height)

    def add(x: float, y: float, across: float, up: float) -> Axes:
        return figure.add_axes((x / width, y / height, across / width, up / height))

    memory, cells = add(LEFT, bottom, span, rise), add(LEFT, bottom - 0.36, span, 0.28)
    names = add(LEFT, legend, span, below)
    return figure, memory, cells, names, add(LEFT + span + GAP, bottom, side, rise) if side else None


def draw_memory(
    axes: Axes,
    sizes: Sequence[int],
    edges: Sequence[float],
    loss: tuple[float, float],
    titles: Mapping[float, str],
    limits: tuple[int, int],
    where: str,
    fixed_bytes: int,
    inch: float,
    again: Sequence[tuple[int, int]] = (),
) -> float:
    """Draw the peaks of phases, and return the top of the axis.

    Args:
        sizes: of every phase [bytes].
        edges: of the phases; an inch of the axis is `inch` of their units.
        loss: where its phase begins and ends.
        titles: of the parts of the step, by their middle.
        limits: the budget, and the peak of storing everything.
        where: words for the phase of the peak.
        fixed_bytes: what is alive during the whole step.
        again: the first and last phase of what runs again.
    """
    right, budget, highest = edges[-1], limits[0], max(limits[1], *sizes)
    top = 1.12 * float(max(highest, budget if budget < 1.35 * highest else 0))
    axes.axvspan(loss[1], right, color=CREAM, lw=0)
    axes.stairs(sizes, edges, baseline=0, fill=True, color=LIGHT_BLUE)
    for first, last in again:
        axes.stairs(sizes[first : last + 1], edges[first : last + 2], baseline=0, fill=True, color=LIGHT_ORANGE)
    axes.stairs(sizes, edges, baseline=None, color=BLUE, lw=1.2)
    _draw_fixed_bytes(axes, fixed_bytes, right, top)
    for x in loss:
        axes.axvline(x, color=PALE, lw=0.8, ls=(0, (2, 2)))
    for x, title in titles.items():
        axes.text(x, top * 1.012, title, fontsize=9.5, color=INK, ha="center", va="bottom")
    _draw_limits(axes, *limits, right, top)
    _draw_peak(axes, sizes, edges, where, top, fixed_bytes, inch)
    axes.set(xlim=(0, right), ylim=(0, top))
    axes.set_ylabel("peak memory", fontsize=9, color=INK)
    mark_bytes(axes.yaxis, 0, top)
    simplify_axes(axes)
    axes.xaxis.set_visible(False)
    return top


def _draw_fixed_bytes(axes: Axes, fixed_bytes: int, right: float, top: float) -> None:
    """Shade what is alive during the whole step, at the bottom of axes that end at `right` and `top`."""
    if fixed_bytes:
        axes.axhspan(0, fixed_bytes, color=GREY, lw=0)
        if fixed_bytes > 0.05 * top:
            words = f"weights, buffers, batch, optimizer state: {format_bytes(fixed_bytes)}"
            axes.text(0.012 * right, fixed_bytes / 2, words, fontsize=8, color=INK, va="center")


def _draw_limits(axes: Axes, budget: int, stored: int, right: float, top: float) -> None:
    """Draw the budget and the peak of storing everything into axes that end at `right` and `top`."""
    pad, color = 0.012 * top, MODE_COLORS[Mode.STORE]
    axes.axhline(stored, color=color, lw=1.2, ls=(0, (1, 2)))
    label = f"everything stored: {format_bytes(stored)}"
    axes.text(right * 0.99, stored + pad, label, fontsize=8.5, color=color, ha="right", va="bottom")
    label = f"budget: {format_bytes(budget)}"
    style: dict[str, Any] = {"fontsize": 8.5, "color": RED, "fontweight": "bold"}
    if budget > top:
        axes.text(right * 0.01, top - pad, f"{label}, above this picture", va="top", **style)
    else:
        axes.axhline(budget, color=RED, lw=1.6)
        axes.text(right * 0.01, budget + pad, label, va="bottom", **style)


def _draw_peak(
    axes: Axes, sizes: Sequence[int], edges: Sequence[float], where: str, top: float, fixed_bytes: int, inch: float
) -> None:
    """Mark the highest of some sizes between edges, and name it below the curve; an inch of the axis is `inch` of its units."""
    k = max(range(len(sizes)), key=sizes.__getitem__)
    highest, middle = sizes[k], (edges[k] + edges[k + 1]) / 2
    lines = (f"peak: {format_bytes(highest)}", where)
    half = max(map(len, lines)) * CHARACTER * inch / 2

    def floor(x: float) -> int:
        first, last = (max(bisect_right(edges, at) - 1, 0) for at in (x - half, x + half))
        return min(sizes[first : last + 1])

    near = [min(max(middle + half * shift / 5, half), edges[-1] - half) for shift in (0, -1, 1, -2, 2, -3, 3, -4, 4)]
    x = max(near, key=floor)  # where the curve leaves room for it
    y = min(max(floor(x) - 0.03 * top, fixed_bytes + 0.14 * top), highest - 0.03 * top)
    axes.plot([middle, middle], [y, highest], color=RED, lw=0.9, zorder=3)
    axes.plot([middle], [highest], "o", ms=7, color=RED, mec="white", mew=1.2, zorder=4, clip_on=False)
    style: dict[str, Any] = {"fontsize": 8.5, "color": INK, "ha": "center", "va": "top", "parse_math": False}
    box = {"boxstyle": "square,pad=0.1", "fc": LIGHT_BLUE, "ec": "none"}
    axes.text(x, y - 0.01 * top, "\n".join(lines), linespacing=1.35, bbox=box, **style)


def _draw_modes(cells: Axes, plan: Plan, span: float) -> None:
    """Draw the schedule below forward, mirrored below backward."""
    count, n = len(plan.phase_peaks), len(plan.units)
    lines = 0.9 if span / count > 0.08 else 0.3
    draw_mode_cells(cells, [plan.schedule], range(n + 1), (0, 1), lines)
    draw_mode_cells(cells, [plan.schedule[::-1]], range(n + 1, count + 1), (0, 1), lines)
    cells.set(xlim=(0, count), ylim=(0, 1))
    cells.axis("off")
    cells.text(-0.1 * count / span, 0.5, "mode", fontsize=9, color=INK, ha="right", va="center")


def draw_front(
    axes: Axes,
    planned: SchedulePoint,
    budget: int,
    front: Sequence[SchedulePoint],
    others: Mapping[str, SchedulePoint],
    top: float,
    stored_flops: int | None = None,
) -> None:
    """Draw peak against time of a plan, of other budgets and of other schedules, on the axis of bytes of the other panel.

    Args:
        stored_flops: of storing everything; FLOPs are shown in percent of them. None shows their number.
    """
    timed = planned["seconds"] is not None

    def work(point: SchedulePoint) -> float:
        if timed:
            return float(point["seconds"] or 0)
        return point["extra_flops"] if stored_flops is None else 100 * point["extra_flops"] / max(1, stored_flops)

    points = sorted((point["peak_bytes"], work(point)) for point in front)
    best = [p for i, p in enumerate(points) if all(x > p[1] for _, x in points[:i])]  # FLOPs are not what was minimised
    ends = [size for size, _ in best[1:]] + [top]  # a schedule is the fastest up to the budget of the next one
    corners = [(x, y) for (size, x), end in zip(best, ends, strict=True) for y in (size, end)]
    axes.plot(*zip(*corners, strict=True), color=MODE_COLORS[Mode.INVERT], lw=1.6, zorder=2)
    axes.plot([x for _, x in points], [size for size, _ in points], "o", ms=3.2, color=MODE_COLORS[Mode.INVERT], zorder=3)
    if budget <= top:
        axes.axhline(budget, color=RED, lw=1.6, zorder=1)
    values = [*(x for _, x in points), *map(work, others.values()), work(planned)]
    low, room = min(values), max(values) - min(values) or max(values) or 1
    axes.set(xlim=(low - 0.34 * room, low + 1.14 * room), ylim=(0, top))
    looks = {"all stored": ("s", MODE_COLORS[Mode.STORE]), "all inverted": ("^", MODE_COLORS[Mode.INVERT])}
    places = {"all stored": (8, 3, "left", "bottom"), "all inverted": (6, -7, "right", "top")}
    for name, point in {**others, "this plan": planned}.items():
        marker, color = ("o", RED) if name == "this plan" else looks.get(name, ("D", PALE))
        dx, dy, ha, va = places.get(name, (-6, -5, "right", "top"))
        where = (work(point), point["peak_bytes"])
        axes.plot(*where, marker, ms=8, color=color, mec="white", mew=1.2, zorder=5)
        style: dict[str, Any] = {"fontsize": 8.5, "color": color, "ha": ha, "va": va, "textcoords": "offset points"}
        axes.annotate(name, where, (dx, dy), **style)
    axes.text(low + 0.4 * room, top * 1.012, "the fastest at other budgets", fontsize=9.5, color=INK, ha="center", va="bottom")
    axes.set_xlabel("time of a training step" if timed else "FLOPs over storing everything", fontsize=9, color=INK)
    mark_bytes(axes.yaxis, 0, top)
    simplify_axes(axes)
    axes.tick_params(labelleft=False)
    axes.xaxis.set_major_locator(MaxNLocator(4))

    def label_work(x: float, _: int) -> str:
        if timed:
            return format_seconds(x)
        return format_flops(int(x)) if stored_flops is None else f"+{x:.3g} %"

    axes.xaxis.set_major_formatter(FuncFormatter(label_work))


def _short(name: str) -> str:
    unit = parse_unit_name(name)
    if unit.stage is None:
        return name
    where = name.removeprefix(f"stages.{unit.stage}.") if unit.number is None else f"block {unit.number}{unit.end}"
    return f"stage {unit.stage}, {where}"
