"""Schedules as rows of coloured cells, with the names of the units below and a legend of the modes."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from revzoo.display.figures.base import LEFT
from revzoo.display.style import INK, MODE_COLORS, PALE
from revzoo.display.unit_name import parse_unit_name
from revzoo.runtime.mode import MODES, Mode

Label = tuple[str, float, float]  # of what is between two places of an axis

CHARACTER = 0.075  # width of a character at 8 points [inch]
_NARROWEST = 0.13  # units that are named [inch]
_LINE = 0.2  # height of a line of the legend [inch]
_MEANINGS = {
    Mode.STORE: "keeps all of its activations",
    Mode.SELECTIVE: "keeps expensive results, reruns the rest",
    Mode.RECOMPUTE: "keeps its input, runs again",
    Mode.INVERT: "keeps nothing, rebuilds from its output",
}


def draw_mode_cells(
    axes: Axes, schedules: Sequence[Sequence[str]], xs: Sequence[int], ys: Sequence[float], line_width: float
) -> None:
    """Draw schedules as a grid of cells, one row for each schedule and one column for each unit.

    Args:
        axes: to draw in.
        schedules: the first is the lowest row.
        xs: borders of the columns, one more than units.
        ys: borders of the rows, one more than schedules.
        line_width: of the white lines between the cells [points].
    """
    grid = [[MODES.index(mode) for mode in schedule] for schedule in schedules]
    colors = ListedColormap([MODE_COLORS[mode] for mode in MODES])
    axes.pcolormesh(xs, ys, grid, cmap=colors, vmin=-0.5, vmax=len(MODES) - 0.5, edgecolors="white", linewidth=line_width)


def draw_labels(axes: Axes, labels: Sequence[Label], inch: float, right: float, height: float, mirrored: float = 0) -> None:
    """Draw labels below forward, each with a bracket over what it names.

    Args:
        axes: of this height, from 0 to `right`.
        labels: to be drawn.
        inch: what an inch of the axis is.
        right: the end of the axis.
        height: as `find_labels_height` gives it [inch].
        mirrored: where backward begins, in which the same follows the other way round; 0 is nowhere.
    """
    axes.set(xlim=(0, right), ylim=(0, height))
    axes.axis("off")
    style: dict[str, Any] = {"fontsize": 8, "color": INK, "ha": "center", "va": "top", "parse_math": False}
    for label, start, end in labels:
        pad = min(0.02 * inch, (end - start) / 4)
        axes.plot([start + pad, end - pad], [height - 0.05] * 2, color=PALE, lw=1.1, solid_capstyle="butt")
        upright = _is_upright(label, start, end, inch)
        axes.text((start + end) / 2, height - 0.12, label, rotation=90 if upright else 0, **style)
    if mirrored:
        arrow = {"arrowstyle": "<-", "color": PALE, "lw": 1}
        axes.annotate("", (right, height - 0.08), (mirrored, height - 0.08), arrowprops=arrow)
        axes.text((mirrored + right) / 2, height - 0.16, "the same, last one first", **style)


def find_labels_height(labels: Sequence[Label], inch: float) -> float:
    """Return the height that labels take below an axis, an inch of which is `inch` [inch]."""
    upright = [len(label) for label, start, end in labels if _is_upright(label, start, end, inch)]
    return 0.3 + 0.85 * CHARACTER * max(upright, default=0)


def _is_upright(label: str, start: float, end: float, inch: float) -> bool:
    """Return whether a label is turned by 90 degrees because it is wider than what it names."""
    return CHARACTER * len(label) > (end - start) / inch


def label_units(units: Sequence[str], cell: float) -> list[Label]:
    """Return a label for each run of units that are named together and have room for a name.

    Args:
        units: names of the units.
        cell: width of a unit [inch].
    """
    runs = groupby(enumerate(units), key=lambda item: _group_key(item[1], item[0]))
    groups = [(label, [k for k, _ in run]) for (label, _), run in runs]
    return [(label, ks[0], ks[-1] + 1) for label, ks in groups if len(ks) * cell >= _NARROWEST]


def _group_key(name: str, k: int) -> tuple[str, int]:
    """Return the label of a unit, and a number that is equal for units that are named together."""
    unit = parse_unit_name(name)
    if unit.number is None:
        return name.rpartition(".")[2], k
    return "steps" if unit.stage is None else f"stage {unit.stage}", -1


def draw_mode_legend(figure: Figure, schedule: Sequence[str], with_counts: bool = True) -> None:
    """Explain at the bottom of the figure the modes that occur in a schedule, and how many units have each."""
    used = [mode for mode in MODES if mode in schedule]
    labels = [f"{mode}{f' ({schedule.count(mode)})' if with_counts else ''}: {_MEANINGS[mode]}" for mode in used]
    colors = [MODE_COLORS[mode] for mode in used]
    draw_legend(figure, dict(zip(labels, colors, strict=True)), _legend_columns(figure.get_size_inches()[0]))


def draw_legend(figure: Figure, colors: Mapping[str, str], columns: int) -> None:
    """Explain colours at the bottom of the figure."""
    width, height = figure.get_size_inches()
    patches = [Patch(color=color, label=label) for label, color in colors.items()]
    style: dict[str, Any] = {"frameon": False, "fontsize": 8.5, "borderaxespad": 0, "borderpad": 0, "handlelength": 1.2}
    figure.legend(handles=patches, loc="lower left", bbox_to_anchor=(LEFT / width, 0.13 / height), ncols=columns, **style)


def mode_legend_height(schedule: Sequence[str], width: float) -> float:
    """Return the height that the legend takes in a figure of this width, with margins [inch]."""
    return 0.3 + _LINE * -(-len(set(schedule)) // _legend_columns(width))


def _legend_columns(width: float) -> int:
    return 4 if width > 12.5 else 2
