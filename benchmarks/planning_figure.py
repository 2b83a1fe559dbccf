"""Pictures of plans: the Pareto fronts of a network, and the schedules and times of all batch sizes."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from revzoo.display.figures.base import LEFT, draw_heading, mark_bytes, new_figure, save, simplify_axes
from revzoo.display.figures.modes import (
    draw_labels,
    draw_mode_cells,
    draw_mode_legend,
    find_labels_height,
    label_units,
    mode_legend_height,
)
from revzoo.display.style import INK, MODE_COLORS, PALE, RED
from revzoo.format import format_seconds
from revzoo.runtime.mode import Mode

_RIGHT = 0.3  # margin to the right of the axes [inch]
_CELL, _MIN_WIDTH, _MAX_WIDTH = 0.26, 6.6, 14.0  # width of a unit, and the limits for all units together [inch]
CURVES = {  # label, color and marker, for each key of a row
    "planned": ("planned", RED, "o"),
    "stored": ("all stored", MODE_COLORS[Mode.STORE], "s"),
    "inverted": ("all inverted", MODE_COLORS[Mode.INVERT], "^"),
}
_PURPLE, _BROWN = "#8b6bb1", "#b0764a"  # further curves


def plot_front(
    series: Mapping[str, Sequence[tuple[int, float]]],
    path: str | Path,
    cost: str,
    title: str,
    peak: str = "all memory together",
) -> None:
    """Draw peak memory against work for the schedules of one network; write a PNG.

    Args:
        series: by label, at most ten beside "planned", "all stored" and "all inverted": points (peak bytes, work divided by
            that of storing everything). "planned" is drawn as a step line.
        path: of the picture.
        cost: what the work is measured in, for the axis.
        title: of the picture.
        peak: what the memory is, for the axis.
    """
    figure = new_figure(8.2, 5.4)
    axes = figure.add_axes((0.115, 0.25, 0.85, 0.59))
    draw_heading(figure, title, ["further down and to the left is better"])
    looks = zip("DvPXh<>pd8", [MODE_COLORS["recompute"], MODE_COLORS["selective"], _PURPLE, _BROWN, PALE] * 2, strict=True)
    known = {label: (marker, color) for label, color, marker in CURVES.values()}
    for label, values in series.items():
        points = sorted(values)
        marker, color = known[label] if label in known else next(looks)
        style: dict[str, Any] = {"marker": marker, "color": color, "label": label, "mec": "white", "mew": 0.8, "ms": 7}
        if label == "planned":
            axes.step(*zip(*points, strict=True), where="post", lw=2.2, **{**style, "ms": 5, "zorder": 4})
        else:
            axes.plot(*zip(*points, strict=True), lw=0.9, ls="-" if len(points) > 1 else "none", **style)
    axes.set_xlabel(f"peak of {peak}", fontsize=9, color=INK)
    axes.set_ylabel(f"{cost} of a step, all stored = 1", fontsize=9, color=INK)
    mark_bytes(axes.xaxis, *axes.get_xlim())
    simplify_axes(axes)
    axes.legend(loc="upper left", bbox_to_anchor=(0, -0.17), ncols=3, frameon=False, fontsize=9)
    save(figure, path)


def plot_schedules(rows: Sequence[Mapping[str, Any]], units: Sequence[str], path: str | Path) -> None:
    """Draw the schedule of every batch size, a row each; write a PNG.

    Args:
        rows: "batch" and "schedule" (one mode for each unit) of every size; the first is drawn lowest.
        units: names of the units.
        path: of the picture.
    """
    span = min(max(_CELL * len(units), _MIN_WIDTH), _MAX_WIDTH)
    rise = min(max(0.24 * len(rows), 0.5), 7.0)
    inch, width, labels = len(units) / span, LEFT + span + _RIGHT, label_units(units, span / len(units))
    below = find_labels_height(labels, inch)
    modes = [mode for row in rows for mode in row["schedule"]]
    legend = mode_legend_height(modes, width)
    bottom = legend + below + 0.06
    height = bottom + rise + 0.95
    figure = new_figure(width, height)
    axes = figure.add_axes((LEFT / width, bottom / height, span / width, rise / height))
    names = figure.add_axes((LEFT / width, legend / height, span / width, below / height))
    draw_heading(figure, "The fastest schedule for each batch size", ["units in the order of forward, from left to right"])
    line_width = 0.9 if min(span / len(units), rise / len(rows)) > 0.08 else 0.2
    draw_mode_cells(axes, [row["schedule"] for row in rows], range(len(units) + 1), range(len(rows) + 1), line_width)
    every = -(-len(rows) // 28)
    axes.set_yticks([i + 0.5 for i in range(0, len(rows), every)], [str(row["batch"]) for row in rows[::every]])
    axes.set_ylabel("batch size", fontsize=9, color=INK)
    axes.xaxis.set_visible(False)
    axes.tick_params(labelsize=8, length=0)
    for side in axes.spines.values():
        side.set_visible(False)
    draw_labels(names, labels, inch, len(units), below)
    draw_mode_legend(figure, modes, with_counts=False)
    save(figure, path)


def plot_times(rows: Sequence[Mapping[str, Any]], path: str | Path) -> None:
    """Draw the time of a training step and of a sample over the batch size; write a PNG.

    Args:
        rows: "batch", and the seconds of a training step as "stored", "inverted" and "planned", None where it does not fit.
        path: of the picture.
    """
    figure = new_figure(10.5, 4.6)
    rows = sorted(rows, key=lambda row: row["batch"])
    lines = ["a bar marks the end of a curve: larger batches do not fit the budget"]
    draw_heading(figure, "Time against batch size", lines)
    for i, shared in enumerate((False, True)):
        axes = figure.add_axes((0.09 + 0.485 * i, 0.13, 0.405, 0.63))
        for key, (label, color, marker) in CURVES.items():
            fits = [(row["batch"], row[key] / (row["batch"] if shared else 1)) for row in rows if row[key] is not None]
            if fits:
                style: dict[str, Any] = {"color": color, "lw": 2.6 if key == "planned" else 1.4, "ms": 4}
                axes.plot(*zip(*fits, strict=True), marker=marker, label=label, **style)
                if fits[-1][0] < rows[-1]["batch"]:
                    axes.plot(*fits[-1], "|", ms=19, mew=2.2, color=color)
        axes.set_xlabel("batch size", fontsize=9, color=INK)
        axes.set_ylabel(f"time per {'sample' if shared else 'training step'}", fontsize=9, color=INK)
        axes.xaxis.set_major_locator(MaxNLocator(8, integer=True, min_n_ticks=1))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda x, _: format_seconds(x)))
        axes.set_ylim(0, 1.12 * axes.get_ylim()[1])
        simplify_axes(axes)
        if shared:
            _draw_best(axes, rows)
        else:
            axes.legend(loc="upper left", frameon=False, fontsize=9)
    save(figure, path)


def _draw_best(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    """Mark the batch size with the least planned time per sample."""
    planned = [row for row in rows if row["planned"] is not None]
    if planned:
        best = min(planned, key=lambda row: row["planned"] / row["batch"])
        x, y = best["batch"], best["planned"] / best["batch"]
        axes.plot(x, y, "o", ms=10, mfc="none", mec=INK, mew=1.5)
        last = x == rows[-1]["batch"] and len(rows) > 1
        is_low = y < 0.2 * axes.get_ylim()[1]  # the axis is below
        style: dict[str, Any] = {"fontsize": 9, "color": INK, "textcoords": "offset points"}
        style |= {"va": "bottom" if is_low else "top", "xytext": (6 if last else 0, 9 if is_low else -9)}
        behind = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1}  # where a curve passes
        axes.annotate(f"best: {x}", (x, y), ha="right" if last else "center", bbox=behind, **style)
