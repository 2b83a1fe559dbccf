"""Plans as pictures: memory over one iteration, schedules over batch sizes, time over batch sizes, and peak against time.

Every function draws what it is given and nothing else, so that the data written beside a picture is all there is in it.
"""

import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from revzoo.display.style import MODE_COLORS
from revzoo.display.tables.plan import Point
from revzoo.format import format_bytes, format_flops, format_seconds
from revzoo.planning.plan import Plan
from revzoo.runtime.schedule import MODES

_INK, _PALE, _GRID = "#222222", "#8a8a8a", "#e3e3e3"
_PLAN, _FILL, _FIXED, _BACKWARD = "#c8452b", "#cfdfee", "#c3c8ce", "#f7f4ec"
_KEEPS = {
    "store": "keeps all of its activations",
    "selective": "keeps products, makes the rest again",
    "recompute": "keeps its input, runs again",
    "invert": "keeps nothing, goes back from its output",
}
_LEFT, _RIGHT, _GAP = 0.95, 0.3, 0.25  # [inch]
_CELL = (0.17, 6.6, 12.5)  # width of a moment, least and most width of all of them [inch]
_CHARACTER = 0.075  # width at 8 points [inch]
_LINE = 0.2  # height of a line of the legend [inch]


def plot_plan(
    plan: Plan, path: str | Path, front: Sequence[Point] = (), others: Mapping[str, Point] | None = None, fixed_bytes: int = 0
) -> None:
    """Draw the memory of one iteration under a plan, the mode of every unit, and what other budgets would take; write a PNG.

    Args:
        front: the fastest schedules of other budgets; none are drawn where it is empty.
        others: schedules to mark beside them, by name.
        fixed_bytes: weights, batch and state of the optimizer, which are shaded at the bottom.
    """
    count = len(plan.phase_peaks)
    cell, least, most = _CELL
    span = min(max(cell * count, least), most)
    side = 3.2 if front else 0.0
    width = _LEFT + span + (side + _GAP if front else 0) + _RIGHT
    below, rise = _names_height(plan.units, span / count), 3.75
    legend = _legend_height(plan.schedule, width)
    bottom = legend + below + 0.4
    height = bottom + rise + 1.35
    figure = Figure(figsize=(width, height), dpi=120, facecolor="white")
    memory = figure.add_axes((_LEFT / width, bottom / height, span / width, rise / height))
    cells = figure.add_axes((_LEFT / width, (bottom - 0.36) / height, span / width, 0.28 / height))
    names = figure.add_axes((_LEFT / width, legend / height, span / width, below / height))
    _heading(figure, plan.setting.model, _plan_lines(plan, others or {}))
    top = _draw_memory(memory, plan, fixed_bytes, count / span)
    _draw_modes(cells, names, plan, span, below)
    if front:
        left = (_LEFT + span + _GAP) / width
        beside = figure.add_axes((left, bottom / height, side / width, rise / height))
        _draw_trade(beside, plan, front, others or {}, top)
    _legend(figure, plan.schedule)
    _save(figure, path)


def _plan_lines(plan: Plan, others: Mapping[str, Point]) -> list[str]:
    stored = others.get("all stored")
    price = f"{format_flops(plan.extra_flops)} more than storing everything"
    if plan.seconds is not None:
        price = f"{format_seconds(plan.seconds)} for a forward and backward"
        if stored is not None and stored["seconds"]:
            ratio = plan.seconds / stored["seconds"] - 1
            price += f", {ratio:+.1%} against storing everything ({format_seconds(stored['seconds'])})"
    return [
        f"batch of {', '.join(plan.setting.batch)}, {plan.setting.dtype} on {plan.setting.device}",
        f"peak {format_bytes(plan.peak_bytes)} of a budget of {format_bytes(plan.budget_bytes)}: {price}",
    ]


def _draw_memory(axes: Axes, plan: Plan, fixed_bytes: int, inch: float) -> float:
    """Draw the bytes of every moment, and return the top of the axis."""
    sizes, count, n = [moment.bytes for moment in plan.phase_peaks], len(plan.phase_peaks), len(plan.units)
    highest = max(plan.no_recompute_peak_bytes, *sizes)
    top = 1.12 * float(max(highest, plan.budget_bytes if plan.budget_bytes < 1.35 * highest else 0))
    axes.axvspan(n + 1, count, color=_BACKWARD, lw=0)
    axes.stairs(sizes, range(count + 1), baseline=0, fill=True, color=_FILL)
    axes.stairs(sizes, range(count + 1), baseline=None, color=MODE_COLORS["invert"], lw=1.6)
    if fixed_bytes:
        axes.axhspan(0, fixed_bytes, color=_FIXED, lw=0)
        if fixed_bytes > 0.05 * top:
            words = f"weights, buffers, batch, optimizer state: {format_bytes(fixed_bytes)}"
            axes.text(0.012 * count, fixed_bytes / 2, words, fontsize=8, color=_INK, va="center")
    for line in (n, n + 1):
        axes.axvline(line, color="white", lw=1.5)
        axes.axvline(line, color=_PALE, lw=0.8, ls=(0, (2, 2)))
    for x, phase in ((n / 2, "forward"), (n + 0.5, "loss"), ((n + 1 + count) / 2, "backward")):
        axes.text(x, top * 1.012, phase, fontsize=9.5, color=_INK, ha="center", va="bottom")
    _draw_limits(axes, plan, top)
    _draw_peak(axes, plan, top, fixed_bytes, inch)
    axes.set(xlim=(0, count), ylim=(0, top))
    axes.set_ylabel("most memory in use", fontsize=9, color=_INK)
    _bytes_axis(axes, top)
    axes.xaxis.set_visible(False)
    return top


def _draw_limits(axes: Axes, plan: Plan, top: float) -> None:
    """Draw the budget and what storing everything takes."""
    count, pad = len(plan.phase_peaks), 0.012 * top
    axes.axhline(plan.no_recompute_peak_bytes, color=MODE_COLORS["store"], lw=1.2, ls=(0, (1, 2)))
    said = f"everything stored: {format_bytes(plan.no_recompute_peak_bytes)}"
    axes.text(count * 0.99, plan.no_recompute_peak_bytes + pad, said, fontsize=8.5, color=MODE_COLORS["store"], ha="right", va="bottom")
    said = f"budget: {format_bytes(plan.budget_bytes)}"
    style: dict[str, Any] = {"fontsize": 8.5, "color": _PLAN, "fontweight": "bold"}
    if plan.budget_bytes > top:
        axes.text(count * 0.01, top - pad, f"{said}, above this picture", va="top", **style)
    else:
        axes.axhline(plan.budget_bytes, color=_PLAN, lw=1.6)
        axes.text(count * 0.01, plan.budget_bytes + pad, said, va="bottom", **style)


def _draw_peak(axes: Axes, plan: Plan, top: float, fixed_bytes: int, inch: float) -> None:
    """Mark the highest moment, and say below the curve what it is; one inch of the axis is `inch` moments."""
    sizes, count = [moment.bytes for moment in plan.phase_peaks], len(plan.phase_peaks)
    k = max(range(count), key=sizes.__getitem__)
    moment = plan.phase_peaks[k]
    where = "at the loss" if moment.phase == "loss" else f"in {moment.phase} of {_short(moment.name)}"
    lines = (f"peak: {format_bytes(moment.bytes)}", where)
    half = max(map(len, lines)) * _CHARACTER * inch / 2

    def floor(x: float) -> int:
        return min(sizes[max(int(x - half), 0) : int(x + half) + 1])

    near = [min(max(k + 0.5 + half * shift / 5, half), count - half) for shift in (0, -1, 1, -2, 2, -3, 3, -4, 4)]
    x = max(near, key=floor)  # where the curve leaves room for it
    y = min(max(floor(x) - 0.03 * top, fixed_bytes + 0.14 * top), moment.bytes - 0.03 * top)
    axes.plot([k + 0.5, k + 0.5], [y, moment.bytes], color=_PLAN, lw=0.9, zorder=3)
    axes.plot([k + 0.5], [moment.bytes], "o", ms=7, color=_PLAN, mec="white", mew=1.2, zorder=4, clip_on=False)
    style: dict[str, Any] = {"fontsize": 8.5, "color": _INK, "ha": "center", "va": "top", "parse_math": False}
    box = {"boxstyle": "square,pad=0.1", "fc": _FILL, "ec": "none"}
    axes.text(x, y - 0.01 * top, "\n".join(lines), linespacing=1.35, bbox=box, **style)


def _draw_modes(cells: Axes, names: Axes, plan: Plan, span: float, below: float) -> None:
    """Draw the schedule under forward, mirrored under backward, and name the units under forward."""
    count, n = len(plan.phase_peaks), len(plan.units)
    lines = 0.9 if span / count > 0.08 else 0.3
    _draw_cells(cells, [plan.schedule], range(n + 1), (0, 1), lines)
    _draw_cells(cells, [plan.schedule[::-1]], range(n + 1, count + 1), (0, 1), lines)
    cells.set(xlim=(0, count), ylim=(0, 1))
    cells.axis("off")
    cells.text(-0.1 * count / span, 0.5, "mode", fontsize=9, color=_INK, ha="right", va="center")
    _draw_names(names, plan.units, span / count, count, below)
    names.annotate("", (count, below - 0.08), (n + 1, below - 0.08), arrowprops={"arrowstyle": "<-", "color": _PALE, "lw": 1})
    said = "the same units, last one first"
    names.text((n + 1 + count) / 2, below - 0.16, said, fontsize=8, color=_INK, ha="center", va="top")


def _draw_cells(
    axes: Axes, schedules: Sequence[Sequence[str]], xs: Sequence[int], ys: Sequence[float], line_width: float
) -> None:
    grid = [[MODES.index(mode) for mode in schedule] for schedule in schedules]
    colors = ListedColormap([MODE_COLORS[mode] for mode in MODES])
    axes.pcolormesh(xs, ys, grid, cmap=colors, vmin=-0.5, vmax=len(MODES) - 0.5, edgecolors="white", linewidth=line_width)


def _draw_names(axes: Axes, units: Sequence[str], cell: float, count: int, height: float) -> None:
    """Name the units below their cells: stages with a bracket, nodes each by its own name."""
    axes.set(xlim=(0, count), ylim=(0, height))
    axes.axis("off")
    for label, start, end in groups(units, cell):
        pad = min(0.25, 0.03 / cell)
        axes.plot([start + pad, end - pad], [height - 0.05] * 2, color=_PALE, lw=1.1, solid_capstyle="butt")
        style: dict[str, Any] = {"fontsize": 8, "color": _INK, "ha": "center", "va": "top", "parse_math": False}
        upright = _upright(label, start, end, cell)
        axes.text((start + end) / 2, height - 0.12, label, rotation=90 if upright else 0, **style)


def _names_height(units: Sequence[str], cell: float) -> float:
    """Return the height that the names below the cells take [inch]."""
    upright = [len(label) for label, start, end in groups(units, cell) if _upright(label, start, end, cell)]
    return 0.3 + 0.85 * _CHARACTER * max(upright, default=0)


def _upright(label: str, start: int, end: int, cell: float) -> bool:
    """Return whether a name has to be turned, because it is wider than its cells."""
    return _CHARACTER * len(label) > (end - start) * cell


def groups(units: Sequence[str], cell: float) -> list[tuple[str, int, int]]:
    """Return (label, start, end) of the runs of units to name together.

    Args:
        cell: width of a unit [inch]; neighbours that are no steps share a name where theirs would overlap.
    """
    found: list[tuple[str, int, int]] = []
    for (label, _), run in groupby(enumerate(units), key=lambda item: _group(item[1], item[0])):
        numbers = [k for k, _ in run]
        found.append((label, numbers[0], numbers[-1] + 1))
    joined = found[:1]
    for label, start, end in found[1:]:
        before, first, _ = joined[-1]
        if cell < 0.13 and end - start == 1 and "stage" not in before and before != "steps":
            joined[-1] = (f"{before}, {label}", first, end)
        else:
            joined.append((label, start, end))
    return joined


def _group(name: str, k: int) -> tuple[str, int]:
    """Return what a unit is named together with, and what keeps nodes apart."""
    if stage := re.match(r"stages\.(\d+)\.blocks\.", name):
        return f"stage {stage[1]}", -1
    if re.fullmatch(r"steps\.\d+", name):
        return "steps", -1
    return name.rpartition(".")[2], k


def _draw_trade(axes: Axes, plan: Plan, front: Sequence[Point], others: Mapping[str, Point], top: float) -> None:
    """Draw the peaks and times of other budgets on the same axis of bytes."""
    timed = plan.seconds is not None

    def work(found: Point) -> float:
        return float(found["seconds"] or 0) if timed else found["extra_flops"]

    this: Point = {"peak_bytes": plan.peak_bytes, "seconds": plan.seconds, "extra_flops": plan.extra_flops}
    points = sorted((found["peak_bytes"], work(found)) for found in front)
    best = [p for i, p in enumerate(points) if all(x > p[1] for _, x in points[:i])]  # FLOPs are not what was minimised
    ends = [size for size, _ in best[1:]] + [top]  # a schedule is the fastest up to the budget of the next one
    corners = [(x, y) for (size, x), end in zip(best, ends, strict=True) for y in (size, end)]
    axes.plot(*zip(*corners, strict=True), color=MODE_COLORS["invert"], lw=1.6, zorder=2)
    axes.plot([x for _, x in points], [size for size, _ in points], "o", ms=3.2, color=MODE_COLORS["invert"], zorder=3)
    if plan.budget_bytes <= top:
        axes.axhline(plan.budget_bytes, color=_PLAN, lw=1.6, zorder=1)
    values = [*(x for _, x in points), *map(work, others.values()), work(this)]
    low, room = min(values), max(values) - min(values) or max(values) or 1
    axes.set(xlim=(low - 0.34 * room, low + 1.14 * room), ylim=(0, top))
    looks = {"all stored": ("s", MODE_COLORS["store"]), "all inverted": ("^", MODE_COLORS["invert"])}
    places = {"all stored": (8, 3, "left", "bottom"), "all inverted": (6, -7, "right", "top")}
    for name, found in {**others, "this plan": this}.items():
        marker, color = ("o", _PLAN) if name == "this plan" else looks.get(name, ("D", _PALE))
        dx, dy, ha, va = places.get(name, (-6, -5, "right", "top"))
        where = (work(found), found["peak_bytes"])
        axes.plot(*where, marker, ms=8, color=color, mec="white", mew=1.2, zorder=5)
        style: dict[str, Any] = {"fontsize": 8.5, "color": color, "ha": ha, "va": va, "textcoords": "offset points"}
        axes.annotate(name, where, (dx, dy), **style)
    axes.text(low + 0.4 * room, top * 1.012, "the fastest at other budgets", fontsize=9.5, color=_INK, ha="center", va="bottom")
    axes.set_xlabel("time of a step" if timed else "FLOPs over storing everything", fontsize=9, color=_INK)
    _bytes_axis(axes, top)
    axes.tick_params(labelleft=False)
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: format_seconds(x) if timed else format_flops(int(x))))


def plot_heatmap(rows: Sequence[Mapping[str, Any]], units: Sequence[str], path: str | Path) -> None:
    """Draw the schedule of every batch size, a row each; write a PNG.

    Args:
        rows: "batch" and "schedule" (one mode for each unit), in the order in which they are to stand, the first below.
        units: names of the units.
    """
    cell, least, most = 0.26, 6.6, 14.0
    span = min(max(cell * len(units), least), most)
    rise = min(max(0.24 * len(rows), 0.5), 7.0)
    width, below = _LEFT + span + _RIGHT, _names_height(units, span / len(units))
    modes = [mode for row in rows for mode in row["schedule"]]
    legend = _legend_height(modes, width)
    bottom = legend + below + 0.06
    height = bottom + rise + 0.95
    figure = Figure(figsize=(width, height), dpi=120, facecolor="white")
    axes = figure.add_axes((_LEFT / width, bottom / height, span / width, rise / height))
    names = figure.add_axes((_LEFT / width, legend / height, span / width, below / height))
    _heading(figure, "The fastest schedule for each batch size", ["units in the order of forward, from left to right"])
    line_width = 0.9 if min(span / len(units), rise / len(rows)) > 0.08 else 0.2
    _draw_cells(axes, [row["schedule"] for row in rows], range(len(units) + 1), range(len(rows) + 1), line_width)
    every = -(-len(rows) // 28)
    axes.set_yticks([i + 0.5 for i in range(0, len(rows), every)], [str(row["batch"]) for row in rows[::every]])
    axes.set_ylabel("batch size", fontsize=9, color=_INK)
    axes.xaxis.set_visible(False)
    axes.tick_params(labelsize=8, length=0)
    for side in axes.spines.values():
        side.set_visible(False)
    _draw_names(names, units, span / len(units), len(units), below)
    _legend(figure, modes, memory=False)
    _save(figure, path)


def plot_times(rows: Sequence[Mapping[str, Any]], path: str | Path) -> None:
    """Draw the time of an iteration and of a sample against the batch size; write a PNG.

    Args:
        rows: "batch" and the seconds of an iteration "stored", "inverted" and "planned", None where it does not fit.
    """
    figure = Figure(figsize=(10.5, 4.6), dpi=120, facecolor="white")
    rows = sorted(rows, key=lambda row: row["batch"])
    lines = ["a bar ends a curve that would go on: larger batches do not fit the budget"]
    _heading(figure, "Time against batch size", lines)
    for i, shared in enumerate((False, True)):
        axes = figure.add_axes((0.09 + 0.485 * i, 0.13, 0.405, 0.63))
        for key, (label, color, marker) in _CURVES.items():
            fits = [(row["batch"], row[key] / (row["batch"] if shared else 1)) for row in rows if row[key] is not None]
            if fits:
                style: dict[str, Any] = {"color": color, "lw": 2.6 if key == "planned" else 1.4, "ms": 4}
                axes.plot(*zip(*fits, strict=True), marker=marker, label=label, **style)
                if fits[-1][0] < rows[-1]["batch"]:
                    axes.plot(*fits[-1], "|", ms=19, mew=2.2, color=color)
        axes.set_xlabel("batch size", fontsize=9, color=_INK)
        axes.set_ylabel(f"time per {'sample' if shared else 'iteration'}", fontsize=9, color=_INK)
        axes.xaxis.set_major_locator(MaxNLocator(8, integer=True, min_n_ticks=1))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda x, _: format_seconds(x)))
        axes.set_ylim(0, 1.12 * axes.get_ylim()[1])
        _plain(axes)
        if shared:
            _draw_best(axes, rows)
        else:
            axes.legend(loc="upper left", frameon=False, fontsize=9)
    _save(figure, path)


def _draw_best(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    """Mark the batch size whose samples are the fastest when planned."""
    planned = [row for row in rows if row["planned"] is not None]
    if planned:
        best = min(planned, key=lambda row: row["planned"] / row["batch"])
        x, y = best["batch"], best["planned"] / best["batch"]
        axes.plot(x, y, "o", ms=10, mfc="none", mec=_INK, mew=1.5)
        last = x == rows[-1]["batch"]
        style: dict[str, Any] = {"fontsize": 9, "color": _INK, "va": "top", "textcoords": "offset points"}
        axes.annotate(f"best: {x}", (x, y), (6 if last else 0, -10), ha="right" if last else "center", **style)


_CURVES = {
    "planned": ("planned", _PLAN, "o"),
    "stored": ("all stored", MODE_COLORS["store"], "s"),
    "inverted": ("all inverted", MODE_COLORS["invert"], "^"),
}


def plot_front(
    series: Mapping[str, Sequence[tuple[int, float]]], path: str | Path, cost: str = "time", title: str = "Peak against time"
) -> None:
    """Draw what schedules of one network take, peak against work; write a PNG.

    Args:
        series: by label, at most ten beside "planned", "all stored" and "all inverted": (bytes at the peak, work over that of
            storing everything). "planned" is drawn as a step line.
        cost: what the work is measured in, for the axis.
        title: of the picture.
    """
    figure = Figure(figsize=(8.2, 5.4), dpi=120, facecolor="white")
    axes = figure.add_axes((0.115, 0.25, 0.85, 0.59))
    _heading(figure, title, ["further down and to the left is better"])
    looks = zip(
        "DvPXh<>pd8", [MODE_COLORS["recompute"], MODE_COLORS["selective"], "#8b6bb1", "#b0764a", _PALE] * 2, strict=True
    )
    known = {label: (marker, color) for label, color, marker in _CURVES.values()}
    for label, found in series.items():
        points = sorted(found)
        marker, color = known[label] if label in known else next(looks)
        style: dict[str, Any] = {"marker": marker, "color": color, "label": label, "mec": "white", "mew": 0.8, "ms": 7}
        if label == "planned":
            axes.step(*zip(*points, strict=True), where="post", lw=2.2, **{**style, "ms": 5, "zorder": 4})
        else:
            axes.plot(*zip(*points, strict=True), lw=0.9, ls="-" if len(points) > 1 else "none", **style)
    axes.set_xlabel("peak of everything in memory", fontsize=9, color=_INK)
    axes.set_ylabel(f"{cost} of a step, all stored = 1", fontsize=9, color=_INK)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: _tick(size)))
    axes.xaxis.set_major_locator(FixedLocator(_byte_ticks(*axes.get_xlim())))
    _plain(axes)
    axes.legend(loc="upper left", bbox_to_anchor=(0, -0.17), ncols=3, frameon=False, fontsize=9)
    _save(figure, path)


def _bytes_axis(axes: Axes, top: float) -> None:
    axes.yaxis.set_major_locator(FixedLocator(_byte_ticks(0, top)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda size, _: _tick(size)))
    _plain(axes)


def _byte_ticks(low: float, high: float, most: int = 7) -> list[float]:
    """Return round sizes (1, 2 or 5 times 1, 10 or 100 of a binary unit, or a half of it) from low to high."""
    steps = (scale * 1024.0**power for power in range(5) for scale in (1, 2, 5, 10, 20, 50, 100, 200, 256, 512))
    step = next(step for step in steps if (high - low) / step <= most)
    return [k * step for k in range(int(-(-low // step)), int(high // step) + 1)]


def _tick(size: float) -> str:
    """Return a size without the zeros behind its point, such as "1.25 GiB"."""
    unit = next(unit for unit in ("TiB", "GiB", "MiB", "KiB", "B") if unit == "B" or size >= _UNITS[unit])
    return f"{size / _UNITS[unit]:.6g} {unit}"


_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


def _plain(axes: Axes) -> None:
    axes.grid(axis="y", color=_GRID, lw=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8, color="#b0b0b0")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#b0b0b0")


def _short(name: str) -> str:
    return re.sub(r"^stages\.(\d+)\.(blocks\.)?", lambda found: f"stage {found[1]}, {'block ' if found[2] else ''}", name)


def _heading(figure: Figure, title: str, lines: Sequence[str]) -> None:
    width, height = figure.get_size_inches()
    left = _LEFT / width
    figure.text(left, 1 - 0.42 / height, title, fontsize=16, fontweight="bold", color=_INK, parse_math=False)
    text = "\n".join(lines)
    figure.text(left, 1 - 0.52 / height, text, fontsize=9, color=_INK, va="top", parse_math=False, linespacing=1.5)


def _legend_columns(width: float) -> int:
    return 4 if width > 12.5 else 2


def _legend_height(schedule: Sequence[str], width: float) -> float:
    """Return the height that the legend takes, with margins [inch]."""
    return 0.3 + _LINE * -(-len(set(schedule)) // _legend_columns(width))


def _legend(figure: Figure, schedule: Sequence[str], counted: bool = True) -> None:
    width, height = figure.get_size_inches()
    used = [mode for mode in MODES if mode in schedule]
    labels = [f"{mode}{f' ({schedule.count(mode)})' if counted else ''}: {_KEEPS[mode]}" for mode in used]
    patches = [Patch(color=MODE_COLORS[mode]) for mode in used]
    where = (_LEFT / width, 0.13 / height)
    style: dict[str, Any] = {"frameon": False, "fontsize": 8.5, "borderaxespad": 0, "borderpad": 0, "handlelength": 1.2}
    figure.legend(patches, labels, loc="lower left", bbox_to_anchor=where, ncols=_legend_columns(width), **style)


def _save(figure: Figure, path: str | Path) -> None:
    figure.savefig(path, format="png", metadata={"Software": None})  # the same bytes whatever the version
