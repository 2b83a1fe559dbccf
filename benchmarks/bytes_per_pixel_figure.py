"""Bytes per pixel of many networks as a picture: the shares of the terms, and the sums."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from revzoo.display.figures.base import draw_heading, new_figure, save, simplify_axes
from revzoo.display.style import BLUE, FAINT, GREY, GRID, INK, LIGHT_BLUE, MODE_COLORS, ORANGE, PALE, RED

_TERMS = {"z": BLUE, "g": ORANGE, "temporaries": GREY}
_LOOKS = {  # marker, color and size of each sum
    "twin": ("D", PALE, 4),
    "stored": ("s", MODE_COLORS["store"], 4),
    "inverted": ("o", MODE_COLORS["invert"], 6),
    "nodes_recomputed": ("<", MODE_COLORS["recompute"], 4),
    "published": ("x", RED, 7),
}
_ROW, _TOP, _BELOW, _LEFT, _RIGHT, _GAP = 0.21, 0.95, 0.9, 2.5, 0.3, 0.35  # [inch]
_WIDTHS = 2.4, 5.6  # of the two panels [inch]


def plot_pixels(rows: Sequence[Mapping[str, Any]], path: str | Path) -> None:
    """Draw a line for each row: its terms as shares of the peak when inverted, and its sums on a logarithmic axis.

    Args:
        rows: "model", "terms" (z, g and temporaries), and each sum by its name where there is one [bytes per pixel].
        path: of the PNG.
    """
    width = _LEFT + sum(_WIDTHS) + _GAP + _RIGHT
    height = _TOP + _ROW * len(rows) + _BELOW
    figure = new_figure(width, height)
    lines = [
        "at the peak of a training step, counted in float32, weights apart; left: what the bytes of the inverted network are"
    ]
    draw_heading(figure, "Bytes per pixel of the images", lines, left=0.3)
    panels, left = [], _LEFT
    for panel in _WIDTHS:
        panels.append(figure.add_axes((left / width, _BELOW / height, panel / width, _ROW * len(rows) / height)))
        left += panel + _GAP
    for axes in panels:
        simplify_axes(axes)
        axes.grid(axis="y", visible=False)
        axes.grid(axis="x", color=GRID, lw=0.8)
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.set_yticks(range(len(rows)), [row["model"] for row in rows])
        axes.tick_params(axis="y", length=0)
    panels[1].tick_params(axis="y", labelleft=False)
    _draw_shares(panels[0], rows)
    _draw_sums(panels[1], rows)
    for axes in panels:
        axes.legend(loc="upper left", bbox_to_anchor=(0, -0.42 / (_ROW * len(rows))), ncols=5, frameon=False, fontsize=9,
                    columnspacing=1.2, handletextpad=0.4, borderaxespad=0)  # fmt: skip
    save(figure, path)


def _draw_shares(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    start = [0.0] * len(rows)
    for term, color in _TERMS.items():
        shares = [100 * row["terms"][term] / sum(row["terms"].values()) for row in rows]
        axes.barh(range(len(rows)), shares, left=start, color=color, height=0.72, label=term)
        start = [a + b for a, b in zip(start, shares, strict=True)]
    axes.set_xlim(0, 100)
    axes.set_xlabel("share [%]", fontsize=9, color=INK)


def _draw_sums(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    for i, row in enumerate(rows):
        sums = [row[name] for name in _LOOKS if row.get(name) is not None]
        axes.plot([min(sums), max(sums)], [i, i], color=LIGHT_BLUE, lw=1.5, zorder=1)
    for name, (marker, color, size) in _LOOKS.items():
        points = [(row[name], i) for i, row in enumerate(rows) if row.get(name) is not None]
        if points:
            axes.plot(*zip(*points, strict=True), marker, color=color, ms=size, mew=1.5, label=name.replace("_", " "))
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: f"{size:,.0f}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.grid(axis="x", color=FAINT, lw=0.6)
    axes.set_xlabel("bytes per pixel", fontsize=9, color=INK)
