"""Throughput and peak memory over the batch size, and what look-ahead gains, as pictures."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from revzoo.display.figures.base import draw_heading, new_figure, save, simplify_axes
from revzoo.display.style import BLUE, INK, MODE_COLORS, ORANGE, PALE, RED

_LOOKS = {  # color, marker and line of each variant
    "ordinary twin": (PALE, "D", "--"),
    "stored": (MODE_COLORS["store"], "s", "-"),
    "inverted": (MODE_COLORS["invert"], "^", "-"),
    "look-ahead": (RED, "o", "-"),
}
_SIZES = (BLUE, RED, MODE_COLORS["selective"], ORANGE, MODE_COLORS["store"], PALE)
_COLUMNS = 3
_PANEL, _LEFT, _RIGHT, _TOP, _BELOW = (3.3, 2.1), 0.85, 0.2, 1.05, 0.85  # of a panel, and margins of the page [inch]
_GAPS, _MIN_WIDTH = (0.6, 0.8), 6.4  # between panels, across and down; of the page [inch]


def plot_throughput(networks: Mapping[str, Mapping[str, Any]], title: str, path: str | Path) -> None:
    """Draw a panel for each network; write a PNG. Error bars are one standard deviation.

    Args:
        networks: by label: "unit", and "rows" with "variant", "batch", "speed" and "deviation".
        title: of the picture.
        path: of the picture.
    """
    figure, panels = lay_out(list(networks), title, ["training steps with AdamW; error bars are one standard deviation"])
    handles: dict[str, Any] = {}
    for (label, axes), network in zip(panels.items(), networks.values(), strict=True):
        handles |= _draw_variants(axes, network["rows"])
        axes.set_ylim(0, 1.1 * axes.get_ylim()[1])
        label_batches(axes, [row["batch"] for row in network["rows"]])
        if label in list(panels)[::_COLUMNS]:
            axes.set_ylabel(f"throughput\n[{network['unit']}]", fontsize=9, color=INK)
    add_legend(figure, handles)
    save(figure, path)


def plot_memory(rows: Sequence[Mapping[str, Any]], published: Sequence[Mapping[str, Any]], path: str | Path) -> None:
    """Draw the peak over the batch size, with a panel for each model; write a PNG. Crosses are published peaks.

    Args:
        rows: "model", "variant", "batch" and "peak_bytes".
        published: the same with "peak_gibibytes".
        path: of the picture.
    """
    models = list(dict.fromkeys(row["model"] for row in rows))
    lines = ["counted, with AdamW" + ("; crosses: the authors' logs on an A100 of 80 GB" if published else "")]
    figure, panels = lay_out(models, "Peak memory of a training step", lines)
    handles: dict[str, Any] = {}
    for model, axes in panels.items():
        for variant, (color, marker, line) in _LOOKS.items():
            counted, logged = (_select(each, model, variant) for each in (rows, published))
            if counted:
                batches, peaks = [row["batch"] for row in counted], [row["peak_bytes"] / 2**30 for row in counted]
                (handles[variant],) = axes.plot(batches, peaks, color=color, marker=marker, ls=line, lw=1.4, ms=4)
            batches, peaks = [row["batch"] for row in logged], [row["peak_gibibytes"] for row in logged]
            axes.plot(batches, peaks, "x", color=color, ms=7, mew=1.5)
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda size, _: f"{size:g}"))
        label_batches(axes, [row["batch"] for row in rows])
        if model in models[::_COLUMNS]:
            axes.set_ylabel("peak [GiB]", fontsize=9, color=INK)
    add_legend(figure, handles)
    save(figure, path)


def _select(rows: Sequence[Mapping[str, Any]], model: str, variant: str) -> list[Mapping[str, Any]]:
    return [row for row in rows if (row["model"], row["variant"]) == (model, variant)]


def lay_out(labels: Sequence[str], title: str, lines: Sequence[str]) -> tuple[Figure, dict[str, Axes]]:
    """Return a page with a heading, and a panel for each label, line by line."""
    columns = min(len(labels), _COLUMNS)
    rows = -(-len(labels) // columns)
    width = max(_LEFT + columns * (_PANEL[0] + _GAPS[0]) - _GAPS[0] + _RIGHT, _MIN_WIDTH)
    height = _TOP + rows * (_PANEL[1] + _GAPS[1]) - _GAPS[1] + _BELOW
    figure = new_figure(width, height)
    draw_heading(figure, title, lines, _LEFT)
    panels: dict[str, Axes] = {}
    for i, label in enumerate(labels):
        row, column = divmod(i, columns)
        left = _LEFT + column * (_PANEL[0] + _GAPS[0])
        bottom = _BELOW + (rows - 1 - row) * (_PANEL[1] + _GAPS[1])
        panels[label] = figure.add_axes((left / width, bottom / height, _PANEL[0] / width, _PANEL[1] / height))
        panels[label].set_title(label, fontsize=10, loc="left", color=INK)
    return figure, panels


def add_legend(figure: Figure, handles: Mapping[str, Any]) -> None:
    """Name the lines at the bottom of the page."""
    corner = (_LEFT / figure.get_size_inches()[0], 0)
    names = list(handles)
    figure.legend(list(handles.values()), names, loc="lower left", bbox_to_anchor=corner, ncols=4, frameon=False, fontsize=9)


def _draw_variants(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    handles: dict[str, Any] = {}
    for variant, (color, marker, line) in _LOOKS.items():
        points = [row for row in rows if row["variant"] == variant]
        if points:
            batches, speeds = [row["batch"] for row in points], [row["speed"] for row in points]
            style: dict[str, Any] = {"color": color, "marker": marker, "ls": line, "lw": 1.4, "ms": 4, "elinewidth": 0.8}
            handles[variant] = axes.errorbar(batches, speeds, yerr=[row["deviation"] for row in points], **style)
    return handles


def plot_gain(gains: Mapping[str, Mapping[int, float]], path: str | Path) -> None:
    """Draw how much faster look-ahead is than inverting one step after the other; write a PNG.

    Args:
        gains: by network and batch size, the throughput of look-ahead over that of inverting.
        path: of the picture.
    """
    figure = new_figure(8.4, 4.4)
    axes = figure.add_axes((0.113, 0.13, 0.71, 0.63))
    draw_heading(figure, "Look-ahead against inverting step by step", ["Rev-Swin, from the smallest size to the largest"])
    for (label, points), color in zip(gains.items(), _SIZES, strict=False):
        gained = [100 * (ratio - 1) for ratio in points.values()]
        axes.plot(list(points), gained, color=color, marker="o", ms=4, lw=1.6, label=label)
    axes.axhline(0, color=INK, lw=0.8)
    axes.set_ylabel("higher throughput [%]", fontsize=9, color=INK)
    label_batches(axes, [batch for points in gains.values() for batch in points])
    axes.legend(frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(1, 1))
    save(figure, path)


def label_batches(axes: Axes, batches: Sequence[int]) -> None:
    """Make the horizontal axis logarithmic, with a tick at every batch size."""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(sorted(set(batches))))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda batch, _: f"{batch:.0f}"))
    axes.set_xlabel("batch size", fontsize=9, color=INK)
    simplify_axes(axes)
