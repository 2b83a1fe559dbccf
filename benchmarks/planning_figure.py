"""The Pareto fronts of a network as a picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from revzoo.display.figures.base import draw_heading, mark_bytes, new_figure, save, simplify_axes
from revzoo.display.figures.batch import CURVES
from revzoo.display.style import INK, MODE_COLORS, PALE

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
